"""Diffusion transformers with the real architectures, small and with random weights, and runs of them over ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

METHOD = "refined:clusters=20,top=8"
TEXT = 32  # tokens of Flux' text


def wan() -> nn.Module:
    """Self-attention over 512 tokens of video and cross-attention to 40 of text, twice."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=24, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=64, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    ).eval()  # fmt: skip


def wan_inputs(timestep: float = 7.0) -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "hidden_states": torch.randn(1, 4, 4, 16, 32),
        "timestep": torch.tensor([timestep]),
        "encoder_hidden_states": torch.randn(1, 40, 16),
        "return_dict": False,
    }


def flux() -> nn.Module:
    """Joint attention over text and image, first as two streams, then as one."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8),
    ).eval()  # fmt: skip


def flux_inputs(timestep: float = 0.7) -> dict[str, Any]:
    torch.manual_seed(1)
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(16.0), torch.arange(16.0))
    return {
        "hidden_states": torch.randn(1, 256, 4),
        "encoder_hidden_states": torch.randn(1, TEXT, 16),
        "pooled_projections": torch.randn(1, 16),
        "timestep": torch.tensor([timestep]),
        "img_ids": places,
        "txt_ids": torch.zeros(TEXT, 3),
        "return_dict": False,
    }


def answer(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**inputs)[0]
    return out


# ---------------------------------------------------------------------------------------------------- two ranks


Job = tuple[Callable[..., Tensor], tuple[Any, ...]]  # a function and what it is given


def on_two_ranks(jobs: dict[str, Job], folder: Path) -> dict[str, Tensor]:
    """What the jobs return on the first of two gloo processes. One pair for all: their start is what takes time."""
    torch.multiprocessing.spawn(_rank, (jobs, str(folder)), nprocs=2)
    found: dict[str, Tensor] = torch.load(folder / "answers.pt")
    return found


def _rank(rank: int, jobs: dict[str, Job], folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.accelerator.device_count = lambda: 1  # by which diffusers divides, also where there is none
    answers = {name: 1 * work(*given) for name, (work, given) in jobs.items()}  # times 1: no longer on its way
    if rank == 0:
        torch.save(answers, f"{folder}/answers.pt")
    dist.barrier()
    dist.destroy_process_group()


def model_over_ranks(make: str, mode: str, method: Any, settings: dict[str, Any]) -> Tensor:
    """The answer of a model whose attention is split over the ranks."""
    from diffusers import ContextParallelConfig

    import clusterattn as ca

    model, inputs = {"wan": (wan, wan_inputs), "flux": (flux, flux_inputs)}[make]
    made = model()
    ca.hosts.diffusers.swap(made, method, min_length=64, **settings)
    made.enable_parallelism(config=ContextParallelConfig(**{mode: 2}))
    return answer(made, inputs())


def gradients_over_ranks(mode: str, method: str, joint: bool) -> Tensor:
    """The gradients of q, k and v of the first rank's tokens."""
    from diffusers.models import attention_dispatch as dispatch
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    import clusterattn as ca

    ca.hosts.diffusers.register(method, min_length=64, joint=joint)
    config = ParallelConfig(context_parallel_config=ContextParallelConfig(**{mode: 2}))
    shape = config.context_parallel_config.mesh_shape
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))
    config.setup(dist.get_rank(), 2, torch.device("cpu"), mesh=mesh)
    mine = [x.chunk(2, 1)[dist.get_rank()].clone().requires_grad_() for x in qkv()]
    out = dispatch.dispatch_attention_fn(
        *mine, backend=dispatch.AttentionBackendName("clusterattn"), parallel_config=config
    )
    weigh(out, dist.get_rank()).backward()
    return torch.stack([x.grad for x in mine if x.grad is not None])


def qkv() -> list[Tensor]:
    torch.manual_seed(2)
    return list(torch.randn(3, 1, 256, 4, 16))


def weigh(out: Tensor, part: int) -> Tensor:
    """Some function of an answer, or of the first (0) or second (1) half of it."""
    torch.manual_seed(3)
    weights = torch.randn(1, 256, 4, 16)
    return (out * (weights if part < 0 else weights.chunk(2, 1)[part])).sum()
