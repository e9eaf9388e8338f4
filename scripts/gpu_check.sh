#!/usr/bin/env bash
# Does everything hold on a GPU? One offline run of under eight minutes, on a machine with an NVIDIA GPU, python3 and jax:
#   1. build the handlers with CUDA   2. pytest -m gpu   3. scripts/bench_kernels.py   4. scripts/generate.py --steps 32
# A stage that fails does not stop the next. Logs go to $OUT (default build/gpu_check); a summary stands last.
#
#     OUT=build/check WHEELS=wheels scripts/gpu_check.sh
#
# PYTHON    the interpreter (.venv's, else python3)
# WHEELS    folder of wheels for what this machine's python lacks (tyro, beartype, ...); installed beside it, not into it
# SANITIZE  1: compute-sanitizer memcheck and racecheck on the small gpu tests too
# STAGES    which stages run: "build test bench generate" by default; "decode" (scripts/bench_decode.py) takes minutes more
# BENCH, PYTEST, DECODE   further arguments of those stages
set -u -o pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo "$PWD/.venv/bin/python" || echo python3)}
if [[ ! -e /dev/nvidia0 ]] && ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
  echo "gpu_check: no NVIDIA GPU found; without one, make test checks what can be checked." >&2
  exit 2
fi
OUT=${OUT:-build/gpu_check}
STAGES=${STAGES:-build test bench generate}
BUILD=${BUILD:-build/cuda}
for name in $STAGES; do
  [[ " build test bench generate decode " == *" $name "* ]] ||
    { echo "gpu_check: STAGES names '$name'; there are build, test, bench, generate, decode." >&2; exit 2; }
done
mkdir -p "$OUT" "$BUILD"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
summary=()
failed=0

has() { "$PYTHON" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" 2>/dev/null; }

# stage NAME SECONDS COMMAND...: runs it with a limit, keeps its output, notes how it ended.
stage() {
  local name=$1 limit=$2 begin=$SECONDS code
  shift 2
  echo "== $name: $*"
  timeout --signal=INT --kill-after=20 "$limit" "$@" >"$OUT/$name.log" 2>&1
  code=$?
  summary+=("$(printf '%-10s %-22s %4d s  %s' "$name" "$( ((code)) && echo "FAILED (exit $code)" || echo ok)" $((SECONDS - begin)) "$OUT/$name.log")")
  ((code)) && failed=1 && tail -n 12 "$OUT/$name.log"
  return "$code"
}

wanted() { [[ " $STAGES " == *" $1 "* ]]; }

# What this python lacks.
missing=()
for module in jax flax numpy pytest hypothesis chex jaxtyping orbax.checkpoint rich safetensors psutil ml_dtypes tyro beartype pytest_timeout; do
  has "$module" || missing+=("$module")
done
if ((${#missing[@]})) && [[ -n ${WHEELS:-} ]]; then
  echo "missing: ${missing[*]}; taking them from $WHEELS"
  mkdir -p "$BUILD/site"
  "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$BUILD/site" --upgrade "$WHEELS"/*.whl >"$OUT/wheels.log" 2>&1 ||
    { echo "wheels could not be installed: $OUT/wheels.log"; tail -n 5 "$OUT/wheels.log"; }
  export PYTHONPATH="$PYTHONPATH:$BUILD/site"
  still=()
  for module in "${missing[@]}"; do has "$module" || still+=("$module"); done
  missing=("${still[@]+"${still[@]}"}")
fi
if ((${#missing[@]})); then
  echo "MISSING: ${missing[*]}. Carry their wheels in a folder and name it in WHEELS."
  summary+=("missing    ${missing[*]}")
fi
lacks() { [[ " ${missing[*]:-} " == *" $1 "* ]]; }

{
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "no nvidia-smi"
  "$PYTHON" -c 'import jax; print("jax", jax.__version__, jax.default_backend(), [d.device_kind for d in jax.devices()])'
} 2>&1 | tee "$OUT/device.log"

if wanted build; then
  stage build 240 bash -c "cmake -S ffi -B '$BUILD' -DHISPARSE_CUDA=ON -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE=\"\$(command -v $PYTHON)\" && cmake --build '$BUILD' -j \"\$(nproc)\"" ||
    { # Without CUDA sources the rest can still be checked.
      stage build-cpp 120 bash -c "cmake -S ffi -B '$BUILD-cpp' -DCMAKE_BUILD_TYPE=Release \
        -DPython_EXECUTABLE=\"\$(command -v $PYTHON)\" && cmake --build '$BUILD-cpp' -j \"\$(nproc)\"" && BUILD=$BUILD-cpp
    }
fi
[[ -f $BUILD/_ffi.so ]] && export HISPARSE_FFI_LIBRARY=$PWD/$BUILD/_ffi.so
[[ $BUILD == /* && -f $BUILD/_ffi.so ]] && export HISPARSE_FFI_LIBRARY=$BUILD/_ffi.so

# Options that belong to plugins which are not there are dropped, not fatal.
pytest_options=(-o addopts= --strict-markers -p no:cacheprovider -p no:randomly)
if lacks beartype; then
  echo "beartype is missing: array annotations are not checked"
else
  pytest_options+=(--jaxtyping-packages=hisparse_jax,pallas_kernels,type_checks.functions_only)
fi
if lacks pytest_timeout; then
  echo "pytest-timeout is missing: tests have no limit of their own"
  pytest_options+=(-W "ignore::pytest.PytestConfigWarning")
fi

# Tests compile more than they compute: several processes share the GPU, none of which may take all its memory.
if has xdist; then
  pytest_options+=(-n "${TEST_PROCESSES:-$(($(nproc) > 15 ? 15 : $(nproc)))}" --maxschedchunk=1)
else
  echo "pytest-xdist is missing: tests run one after the other"
fi

if wanted test; then
  # shellcheck disable=SC2086
  stage test "${TEST_SECONDS:-260}" env XLA_PYTHON_CLIENT_PREALLOCATE=false "$PYTHON" -m pytest -m gpu -v --tb=short --durations=15 "${pytest_options[@]}" ${PYTEST:-tests/test_decode_gpu.py tests}  # the longest first
  grep -E "^(FAILED|ERROR|E  )|passed|failed|^[0-9.]+s (call|setup)" "$OUT/test.log" | cut -c1-180 | tail -n 60
fi

if lacks tyro && { wanted bench || wanted generate || wanted decode; }; then
  echo "tyro is missing: scripts/bench_kernels.py and scripts/generate.py cannot run; carry its wheels (see WHEELS)"
  summary+=("bench      SKIPPED, generate SKIPPED: no tyro")
  failed=1
else
  if wanted bench; then
    # shellcheck disable=SC2086
    stage bench 200 bash -c '"$0" scripts/bench_kernels.py --quick --budget 140 "${@:2}" >"$1/bench.json"' "$PYTHON" "$OUT" ${BENCH:-}
    grep -E '│|┃' "$OUT/bench.log" | sed 's/  */ /g'
  fi
  if wanted generate; then
    stage generate 150 bash -c '"$0" scripts/generate.py --steps 32 >"$1/generate.json"' "$PYTHON" "$OUT"
    grep -E "verdict|tokens/s" "$OUT/generate.log" | tail -n 4
  fi
  if wanted decode; then
    # shellcheck disable=SC2086
    stage decode "${DECODE_SECONDS:-420}" bash -c '"$0" scripts/bench_decode.py "${@:2}" >"$1/decode.json"' "$PYTHON" "$OUT" ${DECODE:-}
    cat "$OUT/decode.log"
  fi
fi

# One process for each tool and file, all at once: one that crashes takes no other with it.
if [[ ${SANITIZE:-0} == 1 ]]; then
  export XLA_PYTHON_CLIENT_PREALLOCATE=false
  sanitize() {  # TOOL FILE
    timeout --kill-after=20 "${SANITIZE_SECONDS:-300}" compute-sanitizer --tool "$1" --error-exitcode 9 --target-processes all \
      "$PYTHON" -m pytest -m gpu -v -k "${SANITIZE_TESTS:-(small and cuda and fp8) or (small_steps and cuda) or small_rows or (equals_resolve and small and fp8) or (equals_numpy and small)}" \
      "${pytest_options[@]}" $(has xdist && echo "-n=0") "tests/test_$2_gpu.py" >"$OUT/$1-$2.log" 2>&1
    echo "exit $?" >>"$OUT/$1-$2.log"
  }
  runs=()
  begin=$SECONDS
  for tool in memcheck racecheck; do
    for file in transfer resolve topk_select resolve_and_gather index_scores sparse_attention; do
      sanitize "$tool" "$file" &
      runs+=("$tool-$file")
    done
  done
  wait
  for name in "${runs[@]}"; do
    said=$(grep -E "ERROR SUMMARY|RACECHECK SUMMARY|passed|failed|not supported|^exit" "$OUT/$name.log" | sed 's/=========//; s/=\{2,\}//g' | tr -s ' \n' ' ')
    summary+=("$(printf '%-30s %s' "$name" "$said")")
    [[ $said == *"exit 0"* ]] || { failed=1; grep -vE "PASSED" "$OUT/$name.log" | tail -n 30; }
    { echo "== $name"; cat "$OUT/$name.log"; } >>"$OUT/sanitize.log"
    rm "$OUT/$name.log"
  done
  summary+=("$(printf '%-10s %4d s  %s' sanitize $((SECONDS - begin)) "$OUT/sanitize.log")")
fi

echo "== summary ($SECONDS s)"
printf '%s\n' "${summary[@]}"
exit "$failed"
