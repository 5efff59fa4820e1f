"""What all tests share: one thread, because the distributed ones fork; and the soak tests, which run when asked for."""

from __future__ import annotations

import signal

import pytest
import torch
import torch._dynamo  # optimizers and fake tensors import it (for seconds): here, once, and not in every forked rank
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
if torch.backends.mkldnn.is_acl_available():  # on ARM, where forked processes would wait for its threads
    torch.backends.mkldnn.set_flags(_enabled=False)
# Started in the background, a process ignores Ctrl-C and so do its children, which some tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """How long an example takes depends on what else the machine does, and is no reason to fail. Which are tried comes
    from the test alone, so that what has passed passes again; -m soak draws others.
    """
    settings.register_profile(
        "weft",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize="soak" not in config.option.markexpr,
        print_blob=True,
    )
    settings.load_profile("weft")
    config.addinivalue_line("markers", "soak: the full product of plans and models, minutes long; run with -m soak")


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """What a test draws without a seed of its own does not depend on the tests before it."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "soak" in config.option.markexpr:
        return
    soak = [item for item in items if item.get_closest_marker("soak")]
    if soak:
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item not in soak]
