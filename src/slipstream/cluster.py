"""Workers of a Ray cluster. If a worker dies, its work is retried by another, up to a limit."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any
from uuid import uuid4

from slipstream.errors import ClusterError, OptionError

RETRIES = 20  # of one piece of work: machines may fail, but work that kills every worker must end


class RayWorkers:
    """Work runs as Ray tasks, not in actors: when a machine fails, Ray moves its tasks to the remaining ones."""

    def __init__(self, address: str, load: Callable[[], Any], gpus: float = 0) -> None:
        """address: `local` starts a cluster on this machine, `auto` finds one that runs here; else a cluster's address.
        load: called once by each worker. gpus: how many a worker needs; 0: a worker takes one core."""
        self._ray = _import_ray()
        self._began = not self._ray.is_initialized()
        if self._began:
            quiet = {"logging_level": "error", "log_to_driver": False}
            try:
                self._ray.init(**quiet, include_dashboard=False) if address == "local" else self._ray.init(
                    address, **quiet
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ClusterError(
                    f"no Ray cluster answers at {address!r} ({error}): start one with `ray start --head`, or use local"
                ) from error
        share = {"num_gpus": gpus} if gpus else {"num_cpus": 1}
        # max_calls: by default, workers with GPUs end after each task and would load again.
        self._task = self._ray.remote(max_retries=RETRIES, max_calls=0, **share)(_call)
        have = self._ray.cluster_resources()
        self.count = int(have.get("GPU", 0) / gpus if gpus else have.get("CPU", 0))
        if self.count < 1:
            self.close()
            raise ClusterError(f"the cluster at {address!r} has no {'GPU' if gpus else 'CPU'} for a worker")
        # In a list, so that Ray passes a reference: a worker fetches it once, not with every task.
        self._load, self._key = [self._ray.put(load)], uuid4().hex

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        """Run work(loaded, *given), where `loaded` is what the worker's `load` returned."""
        future: Future[Any] = Future()
        self._task.remote(self._key, os.getcwd(), self._load, work, given).future().add_done_callback(
            lambda done: self._pass_on(done, future)
        )
        return future

    def _pass_on(self, done: Future[Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        error = done.exception()
        if error is None:
            future.set_result(done.result())
        elif isinstance(error, self._ray.exceptions.RayTaskError):
            future.set_exception(error.cause)  # the error that the work raised
        else:
            future.set_exception(ClusterError(f"a piece of work was lost {RETRIES + 1} times ({error})"))

    def close(self) -> None:
        if self._began:
            self._ray.shutdown()


def _import_ray() -> Any:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's future default; avoids a warning
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise OptionError("--ray needs Ray, which is missing: `pip install ray`, or slipstream-llm[ray]") from error


_loaded: dict[str, Any] = {}  # in a worker process: the result of the latest `load`, by its key


def _call(key: str, folder: str, load: list[Any], work: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    if key not in _loaded:
        with suppress(OSError):  # the caller's folder, since file names may be relative
            os.chdir(folder)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # other cores have their own workers
        _loaded.clear()
        _loaded[key] = importlib.import_module("ray").get(load[0])()
    return work(_loaded[key], *given)
