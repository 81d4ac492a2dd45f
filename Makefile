# make demo   installs what is needed, builds, and runs an unmodified llama.cpp through moecached
# make test   installs, builds and runs the tests
# make bench  prints a row a figure: name, value, goal, met or not
# make fuzz   looks for inputs that break the parsers (SECONDS=600 for each target, FUZZ="gguf ring": those alone)
# make bench-replay  every eviction policy on routing traces (TRACES=folder)
BUILD ?= build
TYPE ?= Release
JOBS ?= $(shell nproc)
# Your own llama.cpp: make LLAMA_SOURCE=~/llama.cpp LLAMA_LIBS=~/llama.cpp/build/bin demo
LLAMA_SOURCE ?= $(BUILD)/llama/source
LLAMA_LIBS ?= $(BUILD)/llama/lib
TRACES ?= tests/data
SECONDS ?= 60

.PHONY: all deps llama configure build demo test bench bench-replay fuzz install clean
all: build

deps:
	@scripts/install_deps.sh

llama: deps
ifeq ($(LLAMA_SOURCE),$(BUILD)/llama/source)
	@scripts/fetch_llama.sh $(BUILD)/llama
endif

configure: llama
	@cmake -S . -B $(BUILD) -G Ninja -DCMAKE_BUILD_TYPE=$(TYPE) -DMOECACHED_LLAMA_DIR=$(abspath $(LLAMA_SOURCE)) \
	  -DMOECACHED_LLAMA_LIBS=$(abspath $(LLAMA_LIBS)) >$(BUILD)/configure.log || { cat $(BUILD)/configure.log; exit 1; }

build: configure
	@cmake --build $(BUILD) -j $(JOBS)

demo: configure
	@cmake --build $(BUILD) -j $(JOBS) --target moecached moecachectl ggml-moecache moecached_llama_host
	@python3 scripts/demo.py --build $(BUILD) --llama-libs $(LLAMA_LIBS)

test: build
	@ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS)

bench: build
	@python3 bench/run.py --build $(BUILD) --llama-libs $(LLAMA_LIBS)

bench-replay: configure
	@cmake --build $(BUILD) -j $(JOBS) --target moecache-sim
	@python3 bench/replay/run.py --build $(BUILD) --traces $(TRACES)

fuzz: configure
	@scripts/install_deps.sh clang libclang-rt-14-dev
	@cmake --build $(BUILD) -j $(JOBS) --target fuzz_seed_files
	@python3 tests/fuzz/run.py --build $(BUILD) --seconds $(SECONDS) $(FUZZ)

install: build
	@cmake --install $(BUILD)

clean:
	rm -rf $(BUILD)
