"""TabPFN v1 and its table for benchmarks/tabpfn_v1.py: the weights, a forward whose attention is a plug, MNIST as rows.

TabPFN (Hollmann et al. 2023) reads a whole table as one sequence: a row is a token, train rows (with their labels)
attend to each other and test rows to the train rows. No positions, no mask, any length, and diffuse attention: what
clustering is for, and a stern judge of it.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from clusterattn._errors import bad_value

HEADS, FEATURES, CLASSES = 4, 100, 10
CLIP = 4.0  # standard deviations, as TabPFN prepares its features
SPAN = 6.0  # standard deviations that the stored features reach
NOISE = 0.1  # standard deviations, on rows that are repeated because the table has no more

SDIST = "tabpfn-0.1.tar.gz"
CHECKPOINT = "prior_diff_real_checkpoint_n_0_epoch_42.cpkt"
CHECKPOINT_SHA256 = "3c9aadaeddbf51462af8c0ee4b3ca3c697890f77e92318abbb0821b75261c392"
IMAGES = {part: (f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz") for part in ("train", "t10k")}
GET_WEIGHTS = f"{SDIST} from https://pypi.org/project/tabpfn/0.1/#files, as it is or unpacked (MIT licence)"
GET_IMAGES = f"MNIST's four files ({', '.join(name for pair in IMAGES.values() for name in pair)})"

Attend = Callable[[Tensor, Tensor, Tensor, str], Tensor]  # q, k, v (1 h n d) and "train" or "test" -> (1 h n d)


# ------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class TabPFN:
    """The weights by their published names, and the forward. Layers and widths follow from the shapes."""

    weights: dict[str, Tensor]
    heads: int = HEADS

    @property
    def layers(self) -> int:
        return sum(name.endswith("in_proj_weight") for name in self.weights)

    def to(self, device: str | torch.device, dtype: torch.dtype) -> TabPFN:
        return TabPFN({name: x.to(device, dtype) for name, x in self.weights.items()}, self.heads)

    def __call__(self, table: Table, attend: Attend) -> Tensor:
        """Logits (test rows, classes). Every attention of the model goes through ``attend``."""
        train = self._linear("encoder", table.x_train) + self._linear("y_encoder", table.y_train[:, None])
        test = self._linear("encoder", table.x_test)
        for layer in range(self.layers):
            train, test = self._layer(f"transformer_encoder.layers.{layer}.", train, test, attend)
        return self._linear("decoder.2", F.gelu(self._linear("decoder.0", test)))

    def _layer(self, name: str, train: Tensor, test: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        weight, bias = (self.weights[f"{name}self_attn.in_proj_{kind}"] for kind in ("weight", "bias"))
        width = train.shape[1]
        q, k, v = (self._split(x) for x in F.linear(train, weight, bias).chunk(3, dim=1))
        asked = self._split(F.linear(test, weight[:width], bias[:width]))
        return (
            self._after(name, train, attend(q, k, v, "train")),
            self._after(name, test, attend(asked, k, v, "test")),
        )

    def _after(self, name: str, x: Tensor, attended: Tensor) -> Tensor:
        """What follows attention in a post-norm layer."""
        joined = attended[0].transpose(0, 1).reshape(x.shape)
        x = self._norm(f"{name}norm1", x + self._linear(f"{name}self_attn.out_proj", joined))
        hidden = F.gelu(self._linear(f"{name}linear1", x))
        return self._norm(f"{name}norm2", x + self._linear(f"{name}linear2", hidden))

    def _split(self, x: Tensor) -> Tensor:
        """(n, h·d) -> (1 h n d), laid out so: what reads it row by row should find rows."""
        return x.unflatten(1, (self.heads, -1)).transpose(0, 1).contiguous()[None]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])


# ------------------------------------------------------------------------------------------------ the table


@dataclass(frozen=True)
class Table:
    """Features standardised on the train rows and clipped; labels as numbers, as the model reads them."""

    x_train: Tensor  # (n, features)
    y_train: Tensor  # (n,)
    x_test: Tensor
    truth: Tensor  # (test rows,) the labels that are asked for
    repeated: bool  # more rows than the data has: good for time alone

    def to(self, device: str | torch.device, dtype: torch.dtype) -> Table:
        x, y, asked = (each.to(device, dtype) for each in (self.x_train, self.y_train, self.x_test))
        return Table(x, y, asked, self.truth.to(device), self.repeated)


def table(data: dict[str, Tensor], rows: int, test_rows: int) -> Table:
    """The first so many train and test rows. Past the end rows repeat, with noise, so that no two are alike."""
    features = data["features"].float() * data["scale"]
    labels, train = data["labels"].float(), int(data["train_rows"])
    if not (1 <= test_rows <= len(features) - train and rows >= 2):
        wanted = f"2 or more rows and 1 to {len(features) - train} test rows"
        raise bad_value(wanted, f"{rows} and {test_rows}", "--rows 4000 --test-rows 1000")
    at = torch.arange(rows) % train
    x, asked = features[at], features[train : train + test_rows]
    mean, spread = x.mean(0), x.std(0).clamp_min(1e-6)
    x, asked = ((each - mean) / spread for each in (x, asked))
    if rows > train:
        x[train:] += NOISE * torch.randn(rows - train, x.shape[1], generator=torch.Generator().manual_seed(0))
    truth = data["labels"][train : train + test_rows].long()
    return Table(x.clamp(-CLIP, CLIP), labels[at], asked.clamp(-CLIP, CLIP), truth, rows > train)


# ------------------------------------------------------------------------------------------------ preparing both


def prepare(weights: Path, images: Path, out: Path) -> list[Path]:
    """Three files: the weights in fp32 and in bf16 (52 MB), and MNIST's principal components in 8 bits (7 MB).

    A machine that is to run in bf16 needs the last two alone.
    """
    read, data = read_weights(weights), principal_components(read_images(images))
    return [
        save(out / "weights_fp32.safetensors", read),
        save(out / "weights_bf16.safetensors", {name: x.bfloat16() for name, x in read.items()}),
        save(out / "mnist.safetensors", data),
    ]


def prepared(folder: Path, dtype: torch.dtype) -> tuple[TabPFN, dict[str, Tensor], str]:
    """The model, the data, and the precision that the weights were stored in: the best that is there and of use."""
    wanted = ("bf16",) if dtype == torch.bfloat16 else ("fp32", "bf16")
    found = [kind for kind in wanted if (folder / f"weights_{kind}.safetensors").is_file()]
    if not found or not (folder / "mnist.safetensors").is_file():
        raise bad_value(
            "weights_*.safetensors and mnist.safetensors",
            f"{folder} without them",
            "`python benchmarks/tabpfn_v1.py prepare --weights FOLDER --images FOLDER` first",
        )
    model = TabPFN(load_file(folder / f"weights_{found[0]}.safetensors"))
    return model, load_file(folder / "mnist.safetensors"), found[0]


def save(path: Path, tensors: dict[str, Tensor]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".tmp")
    save_file({name: x.contiguous() for name, x in tensors.items()}, whole)
    whole.chmod(0o644)  # save_file makes it private
    os.replace(whole, path)
    return path


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The checkpoint's tensors, from the sdist or what it unpacks to. Nothing but tensors and numbers is unpickled."""
    unpacked = next(iter(folder.rglob(CHECKPOINT)), None) if folder.is_dir() else None
    archive = folder / SDIST if folder.is_dir() else folder
    if unpacked is not None:
        content = unpacked.read_bytes()
    elif archive.is_file() and archive.name.endswith(".tar.gz"):
        with tarfile.open(archive) as tar:
            member = tar.extractfile(next(one for one in tar if one.name.endswith(CHECKPOINT)))
            assert member is not None
            content = member.read()
    else:
        raise bad_value(f"TabPFN v1's {CHECKPOINT}", f"{folder} without it", GET_WEIGHTS)
    came = hashlib.sha256(content).hexdigest()
    if came != CHECKPOINT_SHA256:
        raise bad_value(f"a checkpoint with SHA-256 {CHECKPOINT_SHA256}", came, GET_WEIGHTS)
    state, *_ = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    named = {name.removeprefix("module."): x for name, x in state.items()}
    return {name: x.float() for name, x in named.items() if not name.startswith("criterion")}


def read_images(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """(images (n, pixels), labels (n,)) of each part, from MNIST's idx files."""
    missing = [name for pair in IMAGES.values() for name in pair if not (folder / name).is_file()]
    if missing:
        raise bad_value(GET_IMAGES, f"{folder} without {', '.join(missing)}", "any mirror of MNIST, e.g. torchvision's")
    return {part: (idx(folder / pictures), idx(folder / labels)) for part, (pictures, labels) in IMAGES.items()}


def idx(path: Path) -> Tensor:
    """An idx file of bytes: two zeros, the type, the number of dimensions, their sizes, the content."""
    content = gzip.decompress(path.read_bytes())
    kind, dimensions = content[2], content[3]
    sizes = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    start = 4 + 4 * dimensions
    if kind != 8 or len(content) - start != torch.Size(sizes).numel():
        raise bad_value("an idx file of unsigned bytes", f"{path} of type {kind} and {len(content)} bytes", GET_IMAGES)
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(sizes[0], -1).squeeze(1)


def principal_components(parts: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Features of all rows, train rows first: the directions come from all train images, no label plays a part.

    Kept in 8 bits, a scale for each component. Both machines of a comparison then read the same numbers; the rounding
    is 0.014 of a standard deviation, where the model clips at 4.
    """
    pixels = torch.cat([images for images, _ in parts.values()]).float() / 255
    train = len(parts["train"][0])
    centred = pixels - pixels[:train].mean(0)
    covariance = centred[:train].mT.double() @ centred[:train].double() / train
    directions = torch.linalg.eigh(covariance).eigenvectors.flip(1)[:, :FEATURES].float()
    directions = directions * directions.sum(0).sign()  # eigenvectors have no sign of their own
    features = centred @ directions
    scale = features[:train].std(0) * SPAN / 127
    return {
        "features": (features / scale).round().clamp(-127, 127).to(torch.int8),
        "scale": scale,
        "labels": torch.cat([labels for _, labels in parts.values()]),
        "train_rows": torch.tensor(train),
    }
