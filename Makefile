# Colibri without CMake: the two commands of the README (make demo, make test), the C library and its checks.
# Owns: ./.venv and ./build. CMakeLists.txt builds the same sources with the same flags for the Python package.
# Needs make, a C compiler and Python 3.11 or newer with venv. `make help` lists what there is.

PYTHON  ?= python3
CC      ?= cc
AR      ?= ar
MODEL   ?= src/colibri/demo.colibri
IDS     ?= 1 2 3
PROMPT  ?= Once upon a time
WERROR  ?= -Werror
PYTEST  ?= tests --ignore=tests/live --ignore=tests/browser -n auto --maxprocesses 8 --dist loadfile

VERSION := $(shell sed -n 's/^\#define COLIBRI_VERSION "\(.*\)"/\1/p' include/colibri.h)
SONAME  := libcolibri.so.$(firstword $(subst ., ,$(VERSION)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory

# --- Python: one environment, installed again only when a source changed -------------------------------------------
VENV    := .venv
EXTRA   := $(VENV)/bin/python -c 'import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]])'
PIP     := $(VENV)/bin/python -m pip --disable-pip-version-check -qq
SOURCES := $(shell find core include src cmake tools/generate_ffi.py -type f \
             ! -path '*/.*' ! -name '*.pyc' ! -name '*.so' ! -name _ffi.py) \
           pyproject.toml CMakeLists.txt README.md LICENSE

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo 'Python 3.11 or newer is needed; choose one: make PYTHON=/path/to/python3.12 ...' >&2; exit 1; }
	@echo '  venv     $(VENV)'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(SOURCES) | $(VENV)/bin/python
	@echo '  install  colibri $(VERSION)'
	@$(PIP) install .
	@touch $@

$(VENV)/test-packages: pyproject.toml $(VENV)/installed
	@echo '  install  test packages'
	@$(PIP) install $$($(EXTRA) test)
	@touch $@

$(VENV)/dev-packages: pyproject.toml | $(VENV)/bin/python
	@echo '  install  ruff, mypy'
	@$(PIP) install $$($(EXTRA) dev)
	@touch $@

.PHONY: install demo test lint
install: $(VENV)/installed ## build and install the package into ./.venv

demo: $(VENV)/installed ## write a story with the bundled model, then speed and memory
	@$(VENV)/bin/colibri run demo "$(PROMPT)" --max-tokens 250 --temperature 0.7 --seed 1 --stats

test: $(VENV)/test-packages ## run the tests (PYTEST="tests/test_x.py -k name" for some)
	@$(VENV)/bin/python -m pytest $(PYTEST)

lint: $(VENV)/installed $(VENV)/test-packages $(VENV)/dev-packages ## ruff and mypy --strict
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy

# --- C: build/<variant>/ holds objects and programs; the release library and programs are linked into build/ -------
# Flags that every variant shares; the kernels choose their instruction sets inside their files.
CSTD    := -std=c17 -Wall -Wextra -Wpedantic -Wno-psabi $(WERROR) -ffp-contract=off -fvisibility=hidden -fPIC -pthread
INCLUDE := -Iinclude -Icore
LIBS    := -pthread -lm

SANITIZE      := -O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=all
FLAGS_release := -O2 -DNDEBUG
FLAGS_debug   := -O0 -g -DCOLIBRI_TRACE
FLAGS_asan    := $(SANITIZE) -fsanitize=address
FLAGS_ubsan   := $(SANITIZE) -fsanitize=undefined
FLAGS_tsan    := $(SANITIZE) -fsanitize=thread
# The emulation is fused (and fast) only on top of AVX2 and FMA: a processor of 2013 or later.
FLAGS_simde   := -O2 -mavx2 -mfma -mf16c '-DCOLIBRI_AVX512_HEADER="../../tests/c/avx512_emulated.h"' \
                 '-DCOLIBRI_AVX_VNNI_HEADER="../../tests/c/avx_vnni_emulated.h"' $(SIMDE)
FLAGS_aarch64 := $(FLAGS_release) -static
VARIANTS      := release debug asan ubsan tsan simde aarch64
SIMDE         ?=
# Compiler and archiver of a variant that the machine's own do not serve; how its programs are run.
CC_aarch64    ?= aarch64-linux-gnu-gcc
AR_aarch64    ?= aarch64-linux-gnu-ar
QEMU_AARCH64  ?= qemu-aarch64-static

CORE := $(wildcard core/*.c core/kernels/*.c)

# $(1) variant
define variant
build/$(1)/%.o: %.c Makefile
	@mkdir -p $$(@D)
	@echo '  cc       $$@'
	@$$(or $$(CC_$(1)),$$(CC)) $$(CSTD) $$(FLAGS_$(1)) $$(CFLAGS) $$(INCLUDE) -MMD -MP -c $$< -o $$@
build/$(1)/libcolibri.a: $$(CORE:%.c=build/$(1)/%.o)
	@rm -f $$@ && $$(or $$(AR_$(1)),$$(AR)) rcs $$@ $$^
build/$(1)/libcolibri.so: $$(CORE:%.c=build/$(1)/%.o)
	@echo '  link     $$@'
	@$$(or $$(CC_$(1)),$$(CC)) $$(FLAGS_$(1)) $$(CFLAGS) -shared -Wl,-soname,$$(SONAME) $$(LDFLAGS) $$^ $$(LIBS) -o $$@
	@ln -sf libcolibri.so build/$(1)/$$(SONAME)
build/$(1)/colibri_test build/$(1)/stream_test build/$(1)/kernel_test: build/$(1)/%: build/$(1)/tests/c/%.o build/$(1)/libcolibri.a
	@echo '  link     $$@'
	@$$(or $$(CC_$(1)),$$(CC)) $$(FLAGS_$(1)) $$(CFLAGS) $$(LDFLAGS) $$^ $$(LIBS) -o $$@
-include $$(patsubst %.c,build/$(1)/%.d,$$(CORE) tests/c/colibri_test.c tests/c/stream_test.c tests/c/kernel_test.c)
endef
$(foreach v,$(VARIANTS),$(eval $(call variant,$(v))))
.SECONDARY:

build/libcolibri.so build/libcolibri.a build/colibri_test build/stream_test build/kernel_test: build/%: build/release/%
	@ln -sf release/$* $@

.PHONY: lib debug colibri_test stream_test kernel_test kernel_test_simde kernel_test_neon example asan ubsan tsan
lib: build/libcolibri.so build/libcolibri.a ## build/libcolibri.so and .a
	@ln -sf release/$(SONAME) build/$(SONAME)

debug: build/debug/libcolibri.so build/debug/colibri_test build/debug/kernel_test ## build/debug/: -O0 -g, traces on stderr

colibri_test: build/colibri_test ## build/colibri_test: load a model, check it, print the speed

kernel_test: build/kernel_test ## build/kernel_test, and run it: every kernel against scalar C, byte by byte
	build/kernel_test

kernel_test_simde: build/simde/kernel_test ## with AVX-512 and AVX-VNNI emulated (Debian: libsimde-dev; SIMDE=-I... elsewhere)
	build/simde/kernel_test avx512 avx2-vnni

# One run recorded by this machine's kernels must be repeated bit for bit; a core without dot products, then one with.
kernel_test_neon: build/aarch64/kernel_test build/aarch64/colibri_test build/colibri_test ## both NEON sets in QEMU (Debian: gcc-aarch64-linux-gnu, qemu-user-static)
	QEMU_CPU=cortex-a72 $(QEMU_AARCH64) build/aarch64/kernel_test neon
	QEMU_CPU=neoverse-n1 $(QEMU_AARCH64) build/aarch64/kernel_test neon neon-dotprod
	build/colibri_test $(MODEL) --threads 1 --tokens 24 --dump build/aarch64/dispatch.txt >/dev/null
	for cpu in cortex-a72 neoverse-n1; do QEMU_CPU=$$cpu $(QEMU_AARCH64) build/aarch64/colibri_test $(MODEL) \
	    --threads 2 --tokens 24 --replay build/aarch64/dispatch.txt || exit 1; done

example: lib ## compile examples/c/minimal.c in one line and run it on MODEL and IDS
	$(CC) examples/c/minimal.c -Iinclude -Lbuild -lcolibri -Wl,-rpath,'$(CURDIR)/build' -o build/minimal
	build/minimal $(MODEL) $(IDS)

stream_test: build/stream_test ## build/stream_test, and run it: streamed experts, with reads that fail
	build/stream_test $(MODEL) build/stream_test.colibri

asan ubsan tsan: %: build/%/kernel_test build/%/colibri_test build/%/stream_test
	build/$@/kernel_test
	build/$@/colibri_test $(MODEL)
	build/$@/stream_test $(MODEL) build/$@/stream_test.colibri
asan: ## run the C tests under AddressSanitizer
ubsan: ## run the C tests under UndefinedBehaviorSanitizer
tsan: ## run the C tests under ThreadSanitizer

# --- housekeeping --------------------------------------------------------------------------------------------------
.PHONY: clean distclean help
clean: ## remove ./build
	@rm -rf build

distclean: clean ## remove ./build and ./.venv
	@rm -rf $(VENV) dist

help: ## this list
	@sed -n 's/^\([a-z_]*\):.*## \(.*\)/  make \1|\2/p' Makefile | \
	    while IFS='|' read -r name text; do printf '%-26s %s\n' "$$name" "$$text"; done
