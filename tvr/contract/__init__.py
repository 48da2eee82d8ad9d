"""The backend contract: specs, capability data and bound ops. Frozen by ABI version.

Everything a backend needs to know of tvr is here, in `tvr.hookspecs` and in `tvr.errors`.
"""

from tvr.contract.bound import BoundOp, Bounds, StepMeta, check_bound
from tvr.contract.capability import (
    ABI_MAJOR,
    ABI_MINOR,
    ENTRY_POINT_GROUP,
    BackendInfo,
    Box,
    DeviceFacts,
    declared_flags,
    matching_box,
    why_not,
)
from tvr.contract.protocols import PROTOCOLS
from tvr.contract.sampling_tables import SamplingTables
from tvr.contract.specs import (
    COMPOSITES,
    DTYPES,
    OPS,
    SPECS,
    AddRmsNormSpec,
    ArgmaxSpec,
    AttentionDecodeSpec,
    AttentionPrefillSpec,
    AttentionSpec,
    KvWriteSpec,
    LinearSpec,
    OpSpec,
    PrepareStepSpec,
    RmsNormSpec,
    RopeKvWriteSpec,
    RopeSpec,
    SampleSpec,
    SiluMulSpec,
)

__all__ = [
    "ABI_MAJOR",
    "ABI_MINOR",
    "COMPOSITES",
    "DTYPES",
    "ENTRY_POINT_GROUP",
    "OPS",
    "PROTOCOLS",
    "SPECS",
    "AddRmsNormSpec",
    "ArgmaxSpec",
    "AttentionDecodeSpec",
    "AttentionPrefillSpec",
    "AttentionSpec",
    "BackendInfo",
    "BoundOp",
    "Bounds",
    "Box",
    "DeviceFacts",
    "KvWriteSpec",
    "LinearSpec",
    "OpSpec",
    "PrepareStepSpec",
    "RmsNormSpec",
    "RopeKvWriteSpec",
    "RopeSpec",
    "SampleSpec",
    "SamplingTables",
    "SiluMulSpec",
    "StepMeta",
    "check_bound",
    "declared_flags",
    "matching_box",
    "why_not",
]
