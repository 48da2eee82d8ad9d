"""What kernels share on the device."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Annotations of a kernel are Triton's, and read by it as they run: no `from __future__` here.
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until all that was launched before is done and can be read.

    With programmatic dependent launch a kernel starts while the one before it still runs. What is
    no kernel's result, like a weight, may be loaded before this; nothing may be stored.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the next kernel start as soon as every program of this one has come here or ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
