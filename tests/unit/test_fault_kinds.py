"""Whose fault an exception is: a row's own, or the device's, after which nothing on it can be trusted."""

from __future__ import annotations

import pytest

from mlxbcd.engine.faults import DeviceFault, classify
from mlxbcd.errors import ServeError


def test_an_error_that_has_a_code_keeps_it() -> None:
    error = ServeError("bad_request", "-")
    assert classify(error) is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[malloc] Unable to allocate 123 bytes."),
        RuntimeError("[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum"),
        RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory (CUDA error 2)"),
        MemoryError(),
    ],
)
def test_no_memory_is_the_requests_to_retry_shorter(error: Exception) -> None:
    assert classify(error).code == "out_of_memory"


@pytest.mark.parametrize("error", [RuntimeError("no such kernel"), ValueError("shapes differ"), KeyError(3)])
def test_anything_else_is_a_failed_forward_that_names_its_cause(error: Exception) -> None:
    failure = classify(error)
    assert failure.code == "device_error"
    assert failure.retryable
    assert type(error).__name__ in failure.message


@pytest.mark.parametrize(
    "message",
    [
        "[METAL] Command buffer execution failed: Caused GPU Timeout Error",
        "[METAL] Command buffer execution failed: Insufficient Memory (00000008)",
        "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU errors)",
        "CUDA error: an illegal memory access was encountered",
    ],
)
def test_what_breaks_the_stream_is_the_devices_fault(message: str) -> None:
    with pytest.raises(DeviceFault, match=message[:10].strip("[]")):
        classify(RuntimeError(message))


def test_a_fault_stays_a_fault() -> None:
    with pytest.raises(DeviceFault, match="gone"):
        classify(DeviceFault("gone"))
