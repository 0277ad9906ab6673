"""ClusterFormer's neural clustering (section 3.1) by itself, for any vectors, in the manner of scikit-learn."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clusterattn._errors import bad_value, check_choice, check_whole

if TYPE_CHECKING:
    from typing_extensions import Self

SIMILARITIES = ("cosine", "inner")
CHUNK = 8192  # rows that are compared with all centroids at once


class NeuralClustering:
    """Centroids C and a map W^C, both trained by gradient, so that points lie near their centroid.

        labels = NeuralClustering(100).fit_predict(X)     # X: an array or a tensor (points features)

    clusters     how many
    dim          width of X W^C; no more than X has features
    steps, batch, lr   of Adam; lr falls to 0. Each step sees a random batch
    mu, nu       weights of the clustering loss L1 (eq. 6) and the sorting loss L2 (eq. 15)
    keep         weight of a loss for what W^C forgets, |x - x W W'|² over unit vectors x
    similarity   "cosine", or "inner" as in the paper
    sharpness    factor of the similarity inside the subordinate matrix U (eq. 2)
    printed      assign and update as eqs. 2, 3 and 4 are printed, see below
    device, seed the answer depends on nothing else; by default where X is

    Afterwards: cluster_centers_ (clusters features), labels_, projection_ (features dim), centroids_ (clusters dim),
    loss_ (one number for each step).

    The paper's own words leave a method that finds no clusters, so this one reads them as follows.

    * The inner product has no upper bound: L1 falls for ever as vectors grow, and the longest centroid takes all
      points. The cosine is bounded.
    * L1 alone is perfect where W^C maps everything to one line. In the paper the task's loss stands against that; by
      itself the only task is to keep what is in the data, hence ``keep``. W^C starts from the main directions of X,
      which keep most.
    * Eq. 2 normalises U over the points, for each centroid; then U_ij depends on who else is there, and a point may
      belong elsewhere than to the nearest centroid (eq. 4). Here U is normalised over the centroids, as degrees of
      belonging are: the argmax is the nearest.
    * Eq. 3 averages ALL points by their similarity to a centroid, which knows nothing of the other centroids: a step of
      mean shift, and centroids run together where points are dense. Here the loss compares points with the
      trained centroids themselves, which eq. 18 moves.

    ``printed=True`` takes back the last two; ``similarity="inner", keep=0`` the first two.
    """

    cluster_centers_: Any
    labels_: Any
    projection_: Tensor
    centroids_: Tensor
    loss_: list[float]

    def __init__(
        self,
        clusters: int = 8,
        *,
        dim: int = 64,
        steps: int = 400,
        batch: int = 4096,
        lr: float = 0.02,
        mu: float = 1.0,
        nu: float = 0.0,
        keep: float = 1.0,
        similarity: str = "cosine",
        sharpness: float = 20.0,
        printed: bool = False,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        self.clusters, self.dim, self.steps, self.batch, self.lr = clusters, dim, steps, batch, lr
        self.mu, self.nu, self.keep, self.similarity, self.sharpness = mu, nu, keep, similarity, sharpness
        self.printed, self.device, self.seed = printed, device, seed

    # ------------------------------------------------------------------ scikit-learn's manners

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Self:
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise bad_value(f"a setting: {', '.join(known)}", repr(name), "one of these")
            setattr(self, name, value)
        return self

    def fit(self, X: Any, y: Any = None) -> Self:
        self._check()
        x = self._points(X)
        if len(x) < self.clusters:
            raise bad_value(f"at least {self.clusters} points, one for each cluster", len(x), f"clusters={len(x)}")
        dice = torch.Generator().manual_seed(self.seed)  # on the CPU: the same draws for every device
        projection = _main_directions(x[_sampled(len(x), self.batch, dice).to(x.device)], min(self.dim, x.shape[1]))
        sample = x[_sampled(len(x), self.batch, dice).to(x.device)]
        centroids = spread_out(self._unit(sample @ projection), self.clusters, dice)
        self.projection_, self.centroids_ = self._descend(x, projection, centroids, dice)
        self._bar = self._crowding(x)
        self.cluster_centers_ = self._like(X, self.centroids_ @ self.projection_.T)
        self.labels_ = self.predict(X)
        return self

    def predict(self, X: Any) -> Any:
        """The cluster of each point."""
        return self._like(X, torch.cat([each.argmax(-1) for each in self._belonging(self._points(X))]))

    def transform(self, X: Any) -> Any:
        """U, (points clusters): how much each point belongs to each cluster. Rows sum to 1."""
        return self._like(X, torch.cat([each.softmax(-1) for each in self._belonging(self._points(X))]))

    def fit_predict(self, X: Any, y: Any = None) -> Any:
        return self.fit(X).labels_

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        return self.fit(X).transform(X)

    # ------------------------------------------------------------------ how it is trained

    def _descend(
        self, x: Tensor, projection: Tensor, centroids: Tensor, dice: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        w, c = projection.clone().requires_grad_(), centroids.clone().requires_grad_()
        slow = self.lr / 20  # W^C starts where it should be
        optimizer = torch.optim.Adam([{"params": [c], "lr": self.lr}, {"params": [w], "lr": slow}])
        falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / self.steps)
        losses = []
        for _ in range(self.steps):
            sample = x[_sampled(len(x), self.batch, dice).to(x.device)]
            with torch.enable_grad():
                loss = self._loss(sample, w, c)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            falling.step()
            losses.append(loss.detach())
        self.loss_ = torch.stack(losses).tolist()
        return w.detach(), c.detach()

    def _loss(self, x: Tensor, w: Tensor, c: Tensor) -> Tensor:
        seen = x @ w
        z, c = self._unit(seen), self._unit(c)
        alike = z @ c.T * self.sharpness  # (n c)
        if self.printed:
            share = alike.log_softmax(0)  # eq. 2: over the points
            labels, c = share.argmax(-1), self._unit(share.exp().T @ z)  # eqs. 4 and 3
        else:
            labels = alike.argmax(-1)
        loss = -self.mu * (z * c[labels]).sum(-1).mean()  # L1
        if self.nu:
            loss = loss - self.nu * (c * c.roll(1, 0)).sum(-1).mean()  # L2
        if self.keep:
            loss = loss + self.keep * _forgotten(seen / x.norm(dim=-1, keepdim=True).clamp(min=1e-12), w).mean()
        return loss

    def _crowding(self, x: Tensor) -> Tensor:
        """What eq. 2 divides by: for each centroid, the log of its similarity summed over the fitted points."""
        if not self.printed:
            return x.new_zeros(self.clusters)
        self._bar = x.new_zeros(self.clusters)
        return torch.stack([each.logsumexp(0) for each in self._belonging(x)]).logsumexp(0)

    @torch.no_grad()
    def _belonging(self, x: Tensor) -> Iterator[Tensor]:
        """Similarities to the centroids (n c), as U has them before it is normalised over the centroids."""
        if not hasattr(self, "centroids_"):
            raise bad_value("a fitted NeuralClustering", "one without centroids", ".fit(X) first")
        if x.shape[1] != len(self.projection_):
            raise bad_value(f"{len(self.projection_)} features, as in fit", x.shape[1], "the same features")
        c = self._unit(self.centroids_)
        for at in range(0, max(len(x), 1), CHUNK):
            yield self._unit(x[at : at + CHUNK] @ self.projection_) @ c.T * self.sharpness - self._bar

    def _unit(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) if self.similarity == "cosine" else x

    # ------------------------------------------------------------------ what comes in and goes out

    def _check(self) -> None:
        check_whole("NeuralClustering", clusters=self.clusters, dim=self.dim, steps=self.steps, batch=self.batch)
        check_choice("NeuralClustering", "similarity", self.similarity, SIMILARITIES)
        if min(self.mu, self.nu, self.keep) < 0 or self.lr <= 0 or self.sharpness <= 0:
            got = f"mu={self.mu}, nu={self.nu}, keep={self.keep}, lr={self.lr}, sharpness={self.sharpness}"
            raise bad_value("weights of at least 0, lr and sharpness above 0", got, "the defaults")

    def _points(self, given: Any) -> Tensor:
        x = torch.as_tensor(given)
        if x.dim() != 2:
            raise bad_value("X (points features)", tuple(x.shape), "X.reshape(len(X), -1)")
        x = x.detach().to(self.device or x.device, torch.float32)
        if not bool(x.isfinite().all()):
            raise bad_value("numbers in X", "some that are infinite or none", "taking those rows out")
        return x

    def _like(self, given: Any, answer: Tensor) -> Any:
        """A tensor for a tensor, on its device; else an array."""
        return answer.to(given.device) if isinstance(given, Tensor) else answer.cpu().numpy()


def _sampled(total: int, most: int, dice: torch.Generator) -> Tensor:
    return torch.randint(total, (most,), generator=dice) if total > most else torch.arange(total)


def _forgotten(seen: Tensor, w: Tensor) -> Tensor:
    """|x - x W W'|² of unit vectors from seen = x W, without going back to all features."""
    return 1 - 2 * seen.square().sum(-1) + (seen @ (w.T @ w) * seen).sum(-1)


def _main_directions(x: Tensor, count: int) -> Tensor:
    """(features count), orthonormal: those along which the points reach farthest."""
    directions: Tensor = torch.linalg.eigh(x.T @ x)[1]
    return directions[:, -count:].flip(1).contiguous()


def spread_out(z: Tensor, count: int, dice: torch.Generator) -> Tensor:
    """Points that lie apart (k-means++): each is drawn with a chance that grows with its distance from those before."""
    chosen = [int(torch.randint(len(z), (1,), generator=dice))]
    apart = (z - z[chosen[0]]).square().sum(-1)
    for lot in torch.rand(count - 1, generator=dice).tolist():
        mass = apart.double().cumsum(0)
        at = int(torch.searchsorted(mass, lot * mass[-1]).clamp(max=len(z) - 1))
        chosen.append(at)
        apart = torch.minimum(apart, (z - z[at]).square().sum(-1))
    return z[chosen]
