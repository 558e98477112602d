# SPDX-License-Identifier: Apache-2.0
# A short front for the CMake presets. JOBS, PREFIX and DESTDIR may be set.

PREFIX ?= /usr/local
JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 60

SOURCES = $(shell git ls-files -co --exclude-standard '*.c' '*.h' '*.cu' '*.cuh')
# What needs MPI only where there is one.
TIDIED = $(filter-out $(if $(wildcard build/release/mpi/*.so),,mpi/% tests/mpi/%), \
    $(shell git ls-files -co --exclude-standard 'src/*.c' 'tools/*.c' 'examples/*.c' 'bench/*.c' 'mpi/*.c' 'tests/*.c'))

.PHONY: all build demo test bench install clean format format-check tidy fuzz

all: build

build:
	@scripts/install-deps build
	@cmake --preset release >/dev/null
	@cmake --build --preset release -j $(JOBS)

demo:
	@scripts/install-deps build
	@cmake --preset release >/dev/null
	@cmake --build --preset release -j $(JOBS) --target megamoe_tool
	@scripts/demo.sh

test: build
	@scripts/install-deps python
	@ctest --preset release -j $(JOBS)

bench: build
	@build/release/tools/megamoe bench

install:
	@scripts/install-deps build
	@cmake --preset release -DCMAKE_INSTALL_PREFIX=$(abspath $(PREFIX)) >/dev/null
	@cmake --build --preset release -j $(JOBS)
	@DESTDIR=$(DESTDIR) cmake --install build/release

clean:
	rm -rf build

format:
	@scripts/install-deps quality
	@clang-format -i $(SOURCES)

format-check:
	@scripts/install-deps quality
	@clang-format --dry-run --Werror $(SOURCES)

tidy: build
	@scripts/install-deps quality
	@printf '%s\n' $(TIDIED) | xargs -P $(JOBS) -n 1 clang-tidy -p build/release --quiet

fuzz:
	@scripts/install-deps build fuzz
	@cmake --preset fuzz >/dev/null
	@cmake --build --preset fuzz -j $(JOBS)
	@scripts/fuzz.sh $(FUZZ_SECONDS)
