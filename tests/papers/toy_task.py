"""A small task for the training loop's tests: does a row hold a number above 14?"""

from __future__ import annotations

import torch
from torch import nn

from clusterattn_papers.models import Answer, Stack, mean_over
from clusterattn_papers.tasks import Task, classified, padded


class ToyModel(nn.Module):
    def __init__(self, method, dropout=0.1):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.stack = Stack(method, 16, 2, 1, length=16, dropout=dropout)
        self.head = nn.Linear(16, 2)

    def forward(self, ids, mask):
        x, auxiliary = self.stack(self.embed(ids), mask)
        return Answer(self.head(mean_over(x, mask)), auxiliary)


class Toy(Task):
    name, figure = "toy", "accuracy"

    def __init__(self, count=80, dropout=0.1):
        dice = torch.Generator().manual_seed(0)
        rows = [
            torch.randint(1, 20, (int(torch.randint(4, 16, (1,), generator=dice)),), generator=dice)
            for _ in range(count)
        ]
        examples = [(row, int((row > 14).any())) for row in rows]
        self.splits = {"train": examples[: count // 2], "dev": examples[count // 2 :]}
        self.dropout = dropout

    def model(self, method, **sizes):
        return ToyModel(method, self.dropout)

    def length(self, example):
        return len(example[0])

    def collate(self, examples):
        ids, mask = padded([row for row, _ in examples])
        return {"ids": ids, "mask": mask, "label": torch.tensor([label for _, label in examples])}

    def loss(self, model, batch):
        return classified(model(batch["ids"], batch["mask"]), batch["label"])

    def judge(self, model, batches):
        right = total = 0
        for batch in batches:
            right += int((model(batch["ids"], batch["mask"]).logits.argmax(-1) == batch["label"]).sum())
            total += len(batch["label"])
        return {"accuracy": right / total}
