"""Devices: memory, streams, events and the operations on blocks (:mod:`hsswap.driver.base`)."""

from __future__ import annotations

from hsswap.driver.base import Device
from hsswap.driver.host import HostDevice
from hsswap.errors import DeviceError, shown


def open_device(name: str) -> Device:
    """Open ``"host"`` or ``"cuda:N"``; the caller closes it.

    Raises DeviceError for an unknown name, and for a device that this machine or this version
    lacks, with the remedy.
    """
    if name == "host":
        return HostDevice()
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number.isascii() and number.isdigit() and len(number) < 10):
        raise DeviceError(f'device {shown(name)} is unknown; known: "host", "cuda:N" (N from 0)')
    # Imported here: the bindings load libraries, and hosts without a GPU need none of it.
    from hsswap.driver.cuda import CudaDevice

    return CudaDevice(int(number))
