"""Processes: one, or as many as `accelerate launch` started. Each trains on its own batches; gradients are summed.

The head is not wrapped for distributed training, since its parts are called one by one and its gradients come in
pieces. They are summed here as one tensor when they are complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from slipstream.loading.models import to_device


class Processes:
    def __init__(self, device: str | None = None) -> None:
        self.rank, self.count = 0, 1
        self.device = to_device(device)
        self._accelerator: Any = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import Accelerator  # slow to import, and most runs are one process

            self._accelerator = Accelerator(cpu=self.device.type == "cpu")
            self.rank, self.count = self._accelerator.process_index, self._accelerator.num_processes
            self.device = self._accelerator.device

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes."""
        return tensor if self._accelerator is None else self._accelerator.reduce(tensor, "sum")

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        if self._accelerator is not None:
            grads = [p.grad for p in parameters if p.grad is not None]
            total = self.sum(torch.cat([grad.flatten() for grad in grads]))
            for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def agree(self, number: float) -> float:
        """The first process's number, in all processes."""
        if self._accelerator is None:
            return number
        return float(self.sum(torch.tensor(number if self.rank == 0 else 0.0, device=self.device)))

    def wait(self) -> None:
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()

    def close(self) -> None:
        """End the threads that talk to the other processes. Gloo's may still own the last tensor that was sent, and a
        thread that frees it while Python ends aborts the process."""
        if self._accelerator is not None:
            self._accelerator.state.destroy_process_group()
