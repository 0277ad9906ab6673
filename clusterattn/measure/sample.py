"""q, k, v to measure on: the real ones shipped with the package, the user's own, or made up."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from .._errors import bad_type, bad_value, check_choice
from .._extras import need

DATA = Path(__file__).parent.parent / "data"
EMBEDDED = {"short": DATA / "minilm_alice.safetensors", "long": DATA / "tabpfn_mnist.safetensors"}
WIDEST = 128  # the head dim of the long one
Shape = tuple[int, int, int, int]  # b h n d


@dataclass(frozen=True)
class Sample:
    """One set of q, k, v with its masks, and the words to label pictures with.

    Attributes:
        q: queries (b h n d)
        k: keys (b hk m d)
        v: values (b hk m e)
        key_mask: bool (b m), True = a real key
        query_mask: bool (b n), True = a real query
        tokens: words of the first sequence, for maps
        batch: a name for each batch element
        heads: a name for each head
        source: where it comes from, in a sentence
    """

    q: Tensor  # (b h n d)
    k: Tensor  # (b hk m d)
    v: Tensor  # (b hk m e)
    key_mask: Tensor | None = None  # (b m), True = kept
    query_mask: Tensor | None = None  # (b n), True = kept
    tokens: tuple[str, ...] | None = None  # one per position, where n = m
    batch: tuple[str, ...] | None = None  # a name for each b
    heads: tuple[str, ...] | None = None  # a name for each h
    source: str = ""

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """b, h, n, m, d, e."""
        b, h, n, d = self.q.shape
        return b, h, n, self.k.shape[2], d, self.v.shape[3]

    def to(self, device: str | torch.device, dtype: torch.dtype) -> Sample:
        """On another device, or in another dtype.

        Args:
            device: where
            dtype: of q, k and v
        """
        return replace(
            self,
            q=self.q.to(device, dtype),
            k=self.k.to(device, dtype),
            v=self.v.to(device, dtype),
            key_mask=None if self.key_mask is None else self.key_mask.to(device),
            query_mask=None if self.query_mask is None else self.query_mask.to(device),
        )

    def batch_element(self, at: int) -> Sample:
        """One batch element, all its heads.

        Args:
            at: which one
        """
        one = slice(at, at + 1)
        return replace(
            self,
            q=self.q[one],
            k=self.k[one],
            v=self.v[one],
            key_mask=None if self.key_mask is None else self.key_mask[one],
            query_mask=None if self.query_mask is None else self.query_mask[one],
            batch=None if self.batch is None else self.batch[one],
        )

    def cut(self, batch: int, n: int) -> Sample:
        """The first n queries and keys of so many batch elements, which come again when there are no more.

        Args:
            batch: how many batch elements
            n: how many queries and keys
        """
        at = torch.arange(batch, device=self.q.device) % self.q.shape[0]
        return Sample(
            q=self.q[at, :, :n],
            k=self.k[at, :, :n],
            v=self.v[at, :, :n],
            key_mask=None if self.key_mask is None else self.key_mask[at, :n],
            query_mask=None if self.query_mask is None else self.query_mask[at, :n],
            heads=self.heads,
            source=self.source,
        )

    def place(self, b: int, h: int) -> str:
        """A head's name for titles.

        Args:
            b: the batch element
            h: the head
        """
        return f"{self.batch[b] if self.batch else f'batch {b}'}, {self.heads[h] if self.heads else f'head {h}'}"


def embedded(which: str = "short") -> Sample:
    """A sample inside the package, from a real pretrained model (see data/SOURCE.md).

    Args:
        which: "short", a text encoder reading 512 tokens: (3, 4, 512, 32), three layers of four heads; or "long", a
            table model reading 8192 rows: (1, 3, 8192, 128), a head each of three layers
    """
    check_choice("embedded", "which", which, tuple(EMBEDDED))
    return load(EMBEDDED["short"]) if which == "short" else _restored(EMBEDDED["long"])


def tiled(
    b: int, h: int, n: int, d: int, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Sample:
    """The long sample in any shape: its rows and heads come again, narrower ones lie along the main directions.

    Rows that come again are moved by a hundredth of their spread, so that none ties with another; the logits stay as
    sharp as they were. Head dims up to the sample's own, WIDEST.
    """
    long = embedded("long")
    width = long.q.shape[-1]
    if not 0 < d <= width:
        raise bad_value(f"a head dim from 1 to the sample's {width}", d, f"{width}")
    q, k, v = (x[0].to(device) for x in (long.q, long.k, long.v))
    if d < width:
        q, k = (x @ _main(q.mT @ q / q.square().sum() + k.mT @ k / k.square().sum(), d) for x in (q, k))
        q, v = q * (d / width) ** 0.5, v @ _main(v.mT @ v, d)  # the default scale is 1 / sqrt(d)
    rows, heads = (torch.arange(many, device=q.device) % have for many, have in ((n, q.shape[1]), (h, q.shape[0])))

    draw = torch.Generator(q.device).manual_seed(0)

    def again(x: Tensor) -> Tensor:
        spread = 0.01 * x.std(1, keepdim=True)[heads].to(dtype)
        many = x.to(dtype)[heads][:, rows].expand(b, h, n, d).clone()
        later = many[:, :, x.shape[1] :]
        later += spread * torch.randn(later.shape, generator=draw, dtype=dtype, device=x.device)
        return many

    source = f"{long.source}; rows and heads come again" + (f"; along {d} main directions" if d < width else "")
    return Sample(again(q), again(k), again(v), source=source)


def like_a_model(shape: Shape) -> Sample:
    """What to time on where nothing is given: the long sample in this shape; heads too wide for it get a mixture."""
    return tiled(*shape) if shape[3] <= WIDEST else mixture(*shape)


def _main(form: Tensor, d: int) -> Tensor:
    """The d main directions of symmetric forms (h x x): (h x d)."""
    directions: Tensor = torch.linalg.eigh(form.float())[1][..., -d:]
    return directions


def _restored(path: Path) -> Sample:
    """Heads kept as 8-bit ``points`` along a few directions: q, k, v, side by side, are points @ basis + mean."""
    with need("safetensors").safe_open(str(path), framework="pt") as file:
        words = file.metadata()
        names: tuple[str, ...] = tuple(json.loads(words["heads"]))
        numbers = range(len(names))
        mean, points, basis = (
            [file.get_tensor(f"{part}.{j}").float() for j in numbers] for part in ("mean", "points", "basis")
        )
    heads = torch.stack([torch.addmm(mean[j], points[j], basis[j]) for j in numbers])  # (h, n, 3 d)
    q, k, v = (x.contiguous()[None] for x in heads.chunk(3, dim=-1))
    return Sample(q=q, k=k, v=v, batch=tuple(json.loads(words["batch"])), heads=names, source=words["source"])


def load(path: str | Path) -> Sample:
    """Read q, k, v (and key_mask, query_mask) from a safetensors file. Half precision becomes fp32.

    A key_mask alone on self-attention (n = m) also marks the queries: padding is no row to be judged by.

    Args:
        path: of the file
    """
    path = Path(path)
    save = "safetensors.torch.save_file({'q': q, 'k': k, 'v': v}, 'qkv.safetensors')"
    if not path.is_file():
        raise bad_value("a safetensors file", f"{path}, which is not there", "the path of an existing file")
    safe_open, unreadable = need("safetensors").safe_open, need("safetensors").SafetensorError
    try:
        with safe_open(str(path), framework="pt") as file:
            words = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except (unreadable, OSError) as error:
        raise bad_value("a safetensors file", f"{path} ({error})", save) from None

    missing = [name for name in "qkv" if name not in tensors]
    if missing:
        came = ", ".join(sorted(tensors)) or "no tensor at all"
        raise bad_value(f"tensors named q, k and v in {path.name}", came, save)
    q, k, v = (_as_heads(name, tensors[name]) for name in "qkv")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        came = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise bad_value("q (b h n d), k (b hk m d) and v (b hk m e)", came, "tensors that share b, m and d")
    if min(*q.shape, *k.shape, *v.shape) < 1 or q.shape[1] % k.shape[1]:
        came = f"q {tuple(q.shape)}, k {tuple(k.shape)}"
        raise bad_value("hk that divides h, and no empty dimension", came, "as many heads in q as in k")
    key_mask = _as_mask("key_mask", tensors.get("key_mask"), (k.shape[0], k.shape[2]))
    query_mask = _as_mask("query_mask", tensors.get("query_mask"), (q.shape[0], q.shape[2]))
    if query_mask is None and q.shape[2] == k.shape[2]:
        query_mask = key_mask

    for name, x, rows in (("q", q, query_mask), ("k", k, key_mask), ("v", v, key_mask)):
        real = x if rows is None else x.transpose(1, 2)[rows]  # padding may hold anything
        if not real.isfinite().all():
            raise bad_value(f"finite numbers in {name}", "NaN or infinity", f"{name}.nan_to_num() or a mask")

    def names(key: str, count: int) -> tuple[str, ...] | None:
        try:
            found = json.loads(words[key])
        except (KeyError, ValueError):
            return None
        fits = isinstance(found, list) and len(found) == count
        return tuple(str(each) for each in found) if fits else None

    q, k, v = (x if x.dtype == torch.float64 else x.float() for x in (q, k, v))
    return Sample(
        q=q,
        k=k,
        v=v,
        key_mask=key_mask,
        query_mask=query_mask,
        tokens=names("tokens", k.shape[2]) if q.shape[2] == k.shape[2] else None,
        batch=names("batch", q.shape[0]),
        heads=names("heads", q.shape[1]),
        source=words.get("source", path.name),
    )


def mixture(
    b: int,
    h: int,
    n: int,
    d: int,
    *,
    centres: int = 100,
    spread: float = 0.35,
    seed: int = 0,
    m: int | None = None,
) -> Sample:
    """Clusterable data: queries and keys around common centres, per head, values around centres of their own
    (keys that are alike carry values that are alike). ``spread`` is the noise beside the centres.

    Real queries crowd like this (few kinds of question, asked many times); iid Gaussian ones share nothing.

    Args:
        b: batch
        h: heads
        n: queries
        d: dimension
        centres: Gaussians of each head
        spread: of a Gaussian around its centre
        seed: of the draws
        m: keys; None: as many as queries
    """
    m = n if m is None else m
    draw = torch.Generator().manual_seed(seed)

    def normal(count: int) -> Tensor:
        return torch.randn(b, h, count, d, generator=draw)

    def kinds(count: int) -> Tensor:
        return torch.randint(centres, (b, h, count, 1), generator=draw).expand(-1, -1, -1, d)

    middles, contents, asked, held = normal(centres), normal(centres), kinds(n), kinds(m)
    return Sample(
        q=middles.gather(2, asked) + spread * normal(n),
        k=middles.gather(2, held) + spread * normal(m),
        v=contents.gather(2, held) + spread * normal(m),
        source=f"a mixture of {centres} Gaussians per head (spread {spread}, seed {seed})",
    )


def _as_heads(name: str, x: Tensor) -> Tensor:
    if x.ndim != 4:
        advice = f"{name}[None] if the batch dimension is missing" if x.ndim == 3 else f"a 4-dimensional {name}"
        raise bad_value(f"{name} of shape (batch, heads, length, dim)", f"shape {tuple(x.shape)}", advice)
    if not x.is_floating_point():
        raise bad_type(f"{name} of a floating dtype", x.dtype, f"{name}.float()")
    return x


def _as_mask(name: str, mask: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise bad_type(f"{name} of dtype bool, True = kept", mask.dtype, f"{name}.bool()")
    if tuple(mask.shape) != shape:
        raise bad_value(f"{name} of shape {shape}", tuple(mask.shape), "one entry per batch element and position")
    return mask
