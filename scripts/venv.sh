# Sourced by the scripts that make environments: `new_venv DIR PYTHON`, `find_pip DIR`, then
# `step WHAT "${pip[@]}" install …`.

new_venv() { # without pip: Debian ships ensurepip in a package of its own, and the machine's pip can fill it
  rm -rf "$1"
  "$2" -m venv --without-pip "$1"
}

find_pip() { # find_pip DIR: sets `pip` to the command that installs into that environment
  local base
  base="$("$1/bin/python" -c 'import sys; print(sys._base_executable)')"
  if "$1/bin/python" -m pip --version >/dev/null 2>&1; then pip=("$1/bin/python" -m pip)
  elif "$base" -m pip --python "$1/bin/python" --version >/dev/null 2>&1; then pip=("$base" -m pip --python "$1/bin/python")
  elif "$1/bin/python" -m ensurepip >/dev/null 2>&1; then pip=("$1/bin/python" -m pip)
  else
    echo "no pip for $base; on Debian or Ubuntu: apt-get install python3-pip" >&2
    return 1
  fi
  export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
}

INSTALL_LOG=build/install.log

step() { # step WHAT COMMAND…: prints one line; the command's output goes to INSTALL_LOG, whose end is shown on failure
  local what="$1" rc=0
  shift
  echo "$what"
  mkdir -p "$(dirname "$INSTALL_LOG")"
  printf '== %s: %s\n' "$(date +%T)" "$what" >> "$INSTALL_LOG"
  "$@" >> "$INSTALL_LOG" 2>&1 || rc=$?
  [ "$rc" = 0 ] && return 0
  tail -n 30 "$INSTALL_LOG" >&2
  echo "failed with status $rc: $what; the whole log is $INSTALL_LOG" >&2
  return "$rc"
}
