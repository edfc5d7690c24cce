"""From hidden states to short vectors: z-scores, the first principal components, unit length.

Both are fitted on a sample without holding it in memory: its mean and second moments are enough, since the principal
components of z-scores are the eigenvectors of the correlation matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import StoreError

EPSILON = 1e-6
ROWS = 1 << 14  # rows multiplied at a time


class Moments:
    """The count, mean and second moments of a stream of states."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.count = 0
        self._sum = torch.zeros(size, dtype=torch.float64, device=device)
        self._products = torch.zeros(size, size, dtype=torch.float64, device=device)
        self._around: Tensor | None = None  # (H,) near the mean: small products, exact enough in float32

    def add(self, states: Tensor) -> None:
        """states (n, H)."""
        for part in states.to(self._sum.device).split(ROWS):
            if not torch.isfinite(part).all():
                raise StoreError("the model gave states that are not finite: nothing can be searched by those")
            if self._around is None:
                self._around = part.double().mean(0)
            part = (part - self._around).float()
            self.count += len(part)
            self._sum += part.sum(0, dtype=torch.float64)
            self._products += (part.T @ part).double()

    def fit(self, dims: int, standardise: bool = True) -> Transform:
        """standardise: whether the components are those of z-scores, or of states that are only centred."""
        if self.count < 2 or self._around is None:
            raise StoreError(f"a transform is fitted on two states at least, found {self.count}: add text to the store")
        shift = self._sum / self.count
        mean = self._around + shift
        covariance = self._products / self.count - torch.outer(shift, shift)
        variance = covariance.diagonal().clamp(min=0)
        scale = (variance + EPSILON).rsqrt() if standardise else torch.ones_like(variance)
        values, vectors = torch.linalg.eigh((scale[:, None] * covariance * scale).cpu())  # ascending
        values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
        components = vectors[:, : min(dims, len(mean))]  # (H, D)
        # An eigenvector's sign is arbitrary: fix it, so that the same sample gives the same transform.
        largest = components.gather(0, components.abs().argmax(0, keepdim=True))
        components = components * largest.sign()
        explained = values / values.sum().clamp(min=EPSILON)
        return Transform(
            mean.float().cpu(), scale.float().cpu(), components.float().contiguous(), explained[: components.shape[1]]
        )


@dataclass(frozen=True, eq=False)
class Transform:
    mean: Tensor  # (H,)
    scale: Tensor  # (H,) one over the standard deviation
    components: Tensor  # (H, D)
    explained: Tensor  # (D,) the share of the variance along each

    def __call__(self, states: Tensor) -> Tensor:
        """(…, H) -> (…, D) float32 of unit length."""
        reduced = self.project(states)
        return reduced / reduced.norm(dim=-1, keepdim=True).clamp(min=EPSILON)

    def project(self, states: Tensor) -> Tensor:
        """Like a call, without normalising the length."""
        return ((states.float() - self.mean) * self.scale) @ self.components

    @property
    def dims(self) -> int:
        return self.components.shape[1]

    def to(self, device: torch.device | str) -> Transform:
        moved = (t.to(device) for t in (self.mean, self.scale, self.components, self.explained))
        return Transform(*moved)
