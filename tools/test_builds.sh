#!/usr/bin/env bash
# Builds the engine alone in ways that `make test` does not, and runs its tests in each. The test of one result compares a checksum of
# logits with a pinned one, so builds that pass agree bit for bit.
#
#     tools/test_builds.sh compilers | sanitizers | aarch64
#
# Needs meson and ninja on PATH. What is not installed is skipped and named at the end; a build or test that fails makes the exit status 1.
set -uo pipefail
cd "$(dirname "$0")/.."

passed=() failed=() skipped=()

# run NAME MESON_OPTIONS... [-- TESTS...]
run() {
    local name=$1 options=() tests=()
    shift
    while (($#)) && [[ $1 != -- ]]; do options+=("$1"); shift; done
    tests=("${@:2}")
    local folder=build/test-$name
    echo "== $name: ${CC:-cc} ${options[*]}"
    if { [[ -f $folder/build.ninja ]] || meson setup "$folder" -Dwerror=true -Dwarning_level=3 "${options[@]}" >"build/test-$name.log" 2>&1; } \
        && meson test -C "$folder" --print-errorlogs "${tests[@]}"; then
        passed+=("$name")
    else
        failed+=("$name (build/test-$name.log, $folder/meson-logs)")
    fi
}

have() { # have NAME PACKAGES COMMAND...
    local name=$1 packages=$2 command
    for command in "${@:3}"; do
        command -v "$command" >/dev/null && continue
        skipped+=("$name: $command is not installed (Debian: apt-get install $packages)")
        return 1
    done
}

compilers() { # the oldest that are supported, and a build without AVX-512
    have gcc-11 gcc-11 gcc-11 && CC=gcc-11 run gcc-11
    have clang-14 clang-14 clang-14 && CC=clang-14 run clang-14
    run without-avx512 -Davx512=disabled
}

sanitizers() {
    run address -Db_sanitize=address,undefined
    run thread -Db_sanitize=thread -- threads infer forward 'no malloc'
}

aarch64() { # portable kernels only
    have aarch64 'gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user' aarch64-linux-gnu-gcc qemu-aarch64 || return
    run aarch64 --cross-file native/aarch64-linux-gnu.ini
}

case ${1-} in
compilers | sanitizers | aarch64) mkdir -p build && "$1" ;;
*) sed -n '2,8s/^# \?//p' "$0" >&2; exit 2 ;;
esac

for name in "${passed[@]}"; do echo "passed: $name"; done
for reason in "${skipped[@]}"; do echo "skipped: $reason"; done
for name in "${failed[@]}"; do echo "FAILED: $name"; done
exit $((${#failed[@]} > 0))
