"""What devices can do by their makers' word, for costs that are worked out instead of measured.

Dense figures, without sparsity.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fxpipe.costs.topology import GB_PER_S, WIRES
from fxpipe.errors import DeviceError
from fxpipe.ir import Link

PREFIX = "analytic:"


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device. `tera` are its peak 10^12 operations a second by dtype.

    A dtype that is not there runs as float32 does.
    """

    name: str
    tera: Mapping[torch.dtype, float]
    memory_gb: int
    memory_gb_per_s: float
    link: Link
    launch_ms: float
    source: str

    @property
    def capacity_bytes(self) -> int:
        """Bytes that it holds."""
        return self.memory_gb * 10**9

    def operations_per_ms(self, dtype: torch.dtype) -> float:
        """Peak operations on numbers of `dtype`."""
        return 1e9 * self.tera.get(dtype, self.tera[torch.float32])

    @property
    def bytes_per_ms(self) -> float:
        """Peak bytes from and to its memory."""
        return GB_PER_S * self.memory_gb_per_s


def _gpu(
    name: str,
    source: str,
    *,
    half: float,
    bfloat16: float,
    single: float,
    double: float,
    memory_gb: int,
    memory_gb_per_s: float,
    wire: str,
) -> Device:
    """`half` and `bfloat16` on tensor cores with float32 sums; `single` off them, without TF32."""
    tera = {
        torch.float16: half,
        torch.bfloat16: bfloat16,
        torch.float32: single,
        torch.float64: double,
    }
    # 5 us to launch a kernel: what PyTorch takes eagerly, more than the device itself needs.
    return Device(name, tera, memory_gb, memory_gb_per_s, WIRES[wire].link, 0.005, source)


DEVICES: Mapping[str, Device] = {
    "v100": _gpu(
        "NVIDIA V100 SXM2 32 GB",
        "NVIDIA V100 Tensor Core GPU data sheet, January 2020; bfloat16 has no tensor cores",
        half=125,
        bfloat16=15.7,
        single=15.7,
        double=7.8,
        memory_gb=32,
        memory_gb_per_s=900,
        wire="nvlink2",
    ),
    "a100": _gpu(
        "NVIDIA A100 SXM 80 GB",
        "NVIDIA A100 Tensor Core GPU data sheet, June 2021; float64 on tensor cores",
        half=312,
        bfloat16=312,
        single=19.5,
        double=19.5,
        memory_gb=80,
        memory_gb_per_s=2039,
        wire="nvlink3",
    ),
    "h100": _gpu(
        "NVIDIA H100 SXM",
        "NVIDIA H100 Tensor Core GPU data sheet; half of its figures with sparsity",
        half=989.5,
        bfloat16=989.5,
        single=67,
        double=67,
        memory_gb=80,
        memory_gb_per_s=3350,
        wire="nvlink4",
    ),
    "h200": _gpu(
        "NVIDIA H200 SXM",
        "NVIDIA H200 Tensor Core GPU data sheet; half of its figures with sparsity",
        half=989.5,
        bfloat16=989.5,
        single=67,
        double=67,
        memory_gb=141,
        memory_gb_per_s=4800,
        wire="nvlink4",
    ),
    "b200": _gpu(
        "NVIDIA B200 (HGX)",
        "NVIDIA Blackwell architecture technical brief, HGX B200, one of its eight GPUs",
        half=2250,
        bfloat16=2250,
        single=80,
        double=40,
        memory_gb=180,
        memory_gb_per_s=8000,
        wire="nvlink5",
    ),
    "l40s": _gpu(
        "NVIDIA L40S",
        "NVIDIA L40S GPU data sheet; float64 is 1/64 of float32 (Ada architecture whitepaper)",
        half=362.05,
        bfloat16=362.05,
        single=91.6,
        double=1.43,
        memory_gb=48,
        memory_gb_per_s=864,
        wire="pcie4",
    ),
    "rtx3090": _gpu(
        "NVIDIA GeForce RTX 3090",
        "NVIDIA Ampere GA102 GPU architecture whitepaper; float64 is 1/64 of float32",
        half=71,
        bfloat16=71,
        single=35.6,
        double=0.556,
        memory_gb=24,
        memory_gb_per_s=936,
        wire="pcie4",
    ),
    "rtx4090": _gpu(
        "NVIDIA GeForce RTX 4090",
        "NVIDIA Ada GPU architecture whitepaper, appendix A; float64 is 1/64 of float32",
        half=165.2,
        bfloat16=165.2,
        single=82.6,
        double=1.29,
        memory_gb=24,
        memory_gb_per_s=1008,
        wire="pcie4",
    ),
    "cpu": Device(
        "Intel Xeon Platinum 8480+, one socket",
        # 56 cores at the base clock of 2.0 GHz, two AVX-512 units of 16 float32 each, fused
        # multiply and add; 8 channels of DDR5-4800; memory as sold, with 64 GB modules.
        {torch.float32: 56 * 2.0 * 64 / 1000, torch.float64: 56 * 2.0 * 32 / 1000},
        memory_gb=512,
        memory_gb_per_s=307.2,
        link=Link(0.010, GB_PER_S * 307.2),  # lanes share its memory
        launch_ms=0.005,
        source="Intel ARK, Xeon Platinum 8480+: cores, clock, AVX-512 units, channels, DDR5 speed",
    ),
}


def device_named(text: str) -> Device:
    """The device of `analytic:h100`. Raises DeviceError, which lists the names there are."""
    name = text.removeprefix(PREFIX).lower()
    if not text.startswith(PREFIX) or name not in DEVICES:
        known = ", ".join(PREFIX + other for other in DEVICES)
        raise DeviceError(f"there is no analytic profile {text!r}: use one of {known}")
    return DEVICES[name]
