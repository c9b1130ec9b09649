"""verl on processors: a platform for its registry, so that its own trainer, workers and FSDP2 take a step over gloo.

Every process of the run imports it (`VERL_USE_EXTERNAL_MODULES`); `VERL_PLATFORM=cpu` chooses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

SLOT = "GPU"  # what Ray calls the place that a worker takes; `ray_init.num_gpus` says how many there are


class _Device(SimpleNamespace):
    """torch.cpu, with whatever else is asked of a device module: nothing done, nothing used."""

    @staticmethod
    def mem_get_info() -> tuple[int, int]:
        return 0, 1

    @staticmethod
    def get_device_name(*_: object) -> str:
        return "CPU"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *_, **__: 0)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    """One device, index 0, in every process."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # an index would name an accelerator

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VISIBLE_SLOTS"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return SLOT

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


_init_process_group = torch.distributed.init_process_group


def _gloo(backend: str | None = None, *given: Any, **named: Any) -> Any:
    """verl asks for `cpu:gloo,cpu:gloo`, which names the one device twice."""
    return _init_process_group("gloo", *given, **named)


torch.distributed.init_process_group = _gloo
