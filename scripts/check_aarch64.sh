#!/usr/bin/env bash
# Builds the portable kernels for aarch64, runs every native test case under qemu, and compares the
# checksums with those of a build for this machine: they must be the same bits.
#
# Needs, on Debian: apt install g++-aarch64-linux-gnu qemu-user. Where they are missing it says so
# and exits 0, unless --require is given.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

missing=()
command -v aarch64-linux-gnu-g++ > /dev/null || missing+=(g++-aarch64-linux-gnu)
command -v qemu-aarch64 > /dev/null || missing+=(qemu-user)
if ((${#missing[@]})); then
  echo "aarch64: not checked, there is no ${missing[*]} (apt install ${missing[*]})"
  [[ "${1:-}" != --require ]]
  exit
fi

cases() {  # cases FOLDER [CMAKE OPTION...]: build native_cases in build/FOLDER
  local folder=build/$1
  shift
  mkdir -p "$folder"
  cmake -S . -B "$folder" -G Ninja -DLOCKSTEP_ISAS=portable "$@" > "$folder/cmake.log"
  cmake --build "$folder" --target native_cases
}

cases aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
cases portable
build/portable/native_cases > build/portable/checksums.txt
qemu-aarch64 -L /usr/aarch64-linux-gnu build/aarch64/native_cases > build/aarch64/checksums.txt
diff build/portable/checksums.txt build/aarch64/checksums.txt
echo "aarch64: $(wc -l < build/aarch64/checksums.txt) checksums, the same bits as $(uname -m)"
