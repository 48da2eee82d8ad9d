#!/usr/bin/env bash
# Compiles the kernels, then runs the conformance suite on a GPU: prove.sh [LEVEL [REPORT.json]].
# Needs tvr, this package, FlashInfer and nvcc, and no network.
set -euo pipefail
level=${1:-full}
report=${2:-flashinfer-conformance.json}
python=${PYTHON:-python3}
cuda_home=${CUDA_HOME:-$(dirname "$(dirname "$(command -v nvcc)")")}

# FlashInfer links with -lcudart -lcuda and looks in lib64 and lib64/stubs of the toolkit. Where a
# toolkit came with pip they lie elsewhere, and without the name that a linker looks for.
links=$(mktemp -d)
trap 'rm -rf "$links"' EXIT
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
for name in libcudart libcuda; do
    [[ -e $cuda_home/lib64/$name.so || -e $cuda_home/lib64/stubs/$name.so ]] && continue
    found=$(find -L "$cuda_home" "$packages/nvidia" /usr/local/nvidia /usr/lib \
        -name "$name.so*" -print -quit 2>/dev/null || true)
    [[ -n $found ]] && ln -s "$found" "$links/$name.so"
    export FLASHINFER_EXTRA_LDFLAGS=-L$links
done

"$python" - <<'VERSIONS'
import flashinfer, torch, tvr
print(f"tvr {tvr.__version__}, FlashInfer {flashinfer.__version__}, torch {torch.__version__}")
print(torch.cuda.get_device_name())
VERSIONS
"$python" -m tvr_flashinfer.kernels
"$python" -m tvr backends --backend flashinfer --explain --device cuda --dtype bfloat16
status=0
"$python" -m tvr conformance --backend flashinfer --level "$level" --device cuda \
    --json "$report" || status=$?
"$python" -m tvr run --backend flashinfer --device cuda --dtype bfloat16 --stats \
    --max-tokens 32 "ROMEO:"
exit "$status"
