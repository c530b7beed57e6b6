# Front door: the work is done by CMake. On a fresh Debian machine with root or sudo, `make run` and `make test`
# install what is missing; plain `make` only builds, and needs nothing that only the tests need.
BUILD ?= build
CONFIGURE ?=

.PHONY: all run test dependencies test-dependencies format clean

all: $(BUILD)/CMakeCache.txt
	cmake --build $(BUILD) --parallel

$(BUILD)/CMakeCache.txt:
	cmake -S . -B $(BUILD) -G Ninja -DMEGAMOE_TESTS=OFF $(CONFIGURE)

run: dependencies all
	examples/run.sh $(BUILD)

test: dependencies test-dependencies
	cmake -S . -B $(BUILD) -G Ninja -DMEGAMOE_TESTS=ON \
	    -DPython3_EXECUTABLE=$(CURDIR)/$(BUILD)-venv/bin/python3 $(CONFIGURE)
	cmake --build $(BUILD) --parallel
	ctest --test-dir $(BUILD) --output-on-failure --parallel 2

dependencies:
	scripts/dependencies.sh build

test-dependencies:
	scripts/dependencies.sh test
	scripts/test_venv.sh $(BUILD)-venv

format:
	git ls-files '*.c' '*.h' '*.cu' '*.cuh' | xargs clang-format -i

clean:
	rm -rf $(BUILD) $(BUILD)-venv
