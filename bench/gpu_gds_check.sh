#!/bin/bash
# kvikio for real, on a GPU host: the gds contract on its driver, then MB/s beside kvikio itself.
# No GPUDirect is needed: everything is asked for by name on the compatibility path, and says so.
#
# GPU_PYTHON (python3) has what pip install '.[gds,cuda,dev]' brings. A host without a network: wheels
# in .whl are installed first.
#
#   bash bench/gpu_gds_check.sh          results in $OUT (default: build/gds)
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-build/gds}
mkdir -p "$OUT"
python=${GPU_PYTHON:-python3}
if compgen -G '.whl/*.whl' >/dev/null; then
  $python -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target /tmp/site .whl/*.whl || exit
fi
export PYTHONPATH=$PWD:/tmp/site${PYTHONPATH:+:$PYTHONPATH}
status=0

echo "== what gds says of this host"
$python - <<'PY'
import asyncio, tempfile
from pathlib import Path
from hsswap.errors import HsswapError
from hsswap.io import open_backend

async def say(name):
    with tempfile.TemporaryDirectory(dir=".") as place:
        io = open_backend(name)
        try:
            await io.start(Path(place))
            print(f"{name}: {io.path}")
        except HsswapError as error:
            print(f"{name}: refused: {error}")
        await io.close()

for name in ("gds", "gds-compat"):
    asyncio.run(say(name))
PY

echo "== the contract, host and device memory, compatibility path"
timeout 240 $python -m pytest -q -p no:cacheprovider -m '' tests/io/test_gds_conformance.py \
  2>&1 | tee "$OUT/gds_conformance.txt" | tail -n 15
[ "${PIPESTATUS[0]}" -eq 0 ] || status=1

echo "== MB/s, compatibility path"
timeout 240 $python bench/gds_check.py --dir /dev/shm --dir . --threads 4 --threads 16 \
  --out "$OUT/gds_check.json" "$@" || status=1
[ ! -e cufile.log ] || { echo "cufile.log was left in the current directory" >&2; status=1; }
exit $status
