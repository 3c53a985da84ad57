# One command per task; `make help` lists them.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
PORTIONS := proto preprocessor reorder_service trainer cli

.DEFAULT_GOAL := help

# The planner is compiled while most packages are installed, and then beside what `lint` does, which goes on beside the tests: none of
# it needs the other, and some wait for a core, a disk or a server.
MAKEFLAGS += --jobs=4

# Containers often have it, and every process would compile torch again. So would each one do with what pytest makes of asserts.
unexport PYTHONDONTWRITEBYTECODE

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

setup: $(VENV)/.imported $(VENV)/.compiled  ## make .venv with Headrace and all it needs

# The pip that Python 3.11 brings takes minutes of processor time to find what is pinned; a later one seconds.
PIP_INSTALL := $(BIN)/pip install --no-compile --disable-pip-version-check --progress-bar off --constraint constraints.txt
OLD_PYTHON := Headrace needs Python 3.11 or later, and `$(PYTHON)` is %d.%d: name another one, as in `make setup PYTHON=python3.11`

# A command that may take minutes: every ten seconds the last line that it wrote to TARGET.log is shown, and where it fails the end.
define told
	@past_s=0; while sleep 10 > /dev/null 2>&1; do past_s=$$((past_s + 10)); echo "$$past_s s: $$(tail -n 1 $@.log | cut -c 1-100)"; done & teller=$$!; \
	{ $(1); } > $@.log 2>&1 || failed=yes; kill $$teller; \
	test -z "$$failed" || { tail -n 20 $@.log; exit 1; }
endef

# What every service needs, before torch and other large packages: the planner needs no more. And what builds Headrace, for which pip
# would otherwise make an environment of its own.
$(VENV)/.base: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (some minutes the first time; torch brings several GB where it is the build with CUDA)"
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit("$(OLD_PYTHON)" % v if v < (3, 11) else 0)'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check 'pip>=25'
	$(call told,$(BIN)/python docker/requirements.py pyproject.toml | $(PIP_INSTALL) --requirement /dev/stdin 'hatchling>=1.25')
	@touch $@

$(VENV)/.installed: $(VENV)/.base
	$(call told,$(PIP_INSTALL) --no-build-isolation --editable '.[dev]')
	@touch $@

$(VENV)/.compiled: $(VENV)/.base
	@echo "compiling the planner (a minute or two)"
	@PYTHONPATH=proto:reorder_service $(BIN)/python -m tests.nursery.kernels
	@touch $@

# What no service needs as it starts. Each test that comes to it would compile it, in several processes at the same time.
$(VENV)/.searches: $(VENV)/.base
	@PYTHONPATH=proto:reorder_service $(BIN)/python -m tests.nursery.search_kernels
	@touch $@

# The nursery of the tests imports whatever commands import, which writes its bytecode. To compile all that is installed takes four
# times as long: most of it nobody imports.
$(VENV)/.imported: $(VENV)/.installed
	@$(BIN)/python -c 'from tests.nursery import commands; commands.load()'
	@touch $@

# The same for what tests import, and the tests themselves, whose asserts pytest rewrites: each process of the suite would do so. What
# commands import is imported on the way, and not twice.
$(VENV)/.collected: $(VENV)/.installed
	@$(BIN)/python -c 'import sys; from tests.nursery import commands; commands.load(); import pytest; sys.exit(pytest.main(sys.argv[1:]))' \
		$(PYTEST_OPTIONS) --collect-only --quiet --quiet > $(VENV)/collected.log || { tail $(VENV)/collected.log; exit 1; }
	@touch $@

# A headless Chromium for the tests of the page (70 MB), beside the packages. Where npm is missing they are skipped, and say so.
$(VENV)/.browser: tests/page/fetch_browser.py | $(VENV)/.base
	@if $(BIN)/python -m tests.page.fetch_browser; then touch $@; fi

# What only the site needs comes when the site is made.
$(VENV)/.docs: $(VENV)/.installed
	@$(PIP_INSTALL) --quiet --editable '.[docs]'
	@touch $@

docs: $(VENV)/.docs  ## make the documentation's site in build/site, with references of commands, of a job's fields and of the library, and check its links (a minute)
	@$(BIN)/python -m website

links:  ## ask other hosts whether what pages link to is there, which needs the network (a minute)
	@$(PYTHON) -m website.outer_links

demo: setup  ## run the main job on the bundled example: one reorder service, two preprocessors, a pipeline of three trainers
	@$(BIN)/headrace demo

# Of all that comes with the plugins that pytest finds by itself, hypothesis among it, each process would rewrite the asserts.
PLUGINS := xdist pytest_asyncio.plugin pytest_timeout pytest_rerunfailures _hypothesis_pytestplugin
PYTEST_OPTIONS := --disable-plugin-autoload $(PLUGINS:%=-p %)
PYTEST := $(BIN)/pytest $(PYTEST_OPTIONS)

test: lint suite  ## style, types and layers, and the suite; what is left out for its time is in test-slow

# What fails is tried twice more, and is named at the end with what went wrong at first: on a machine that others use, too, a process
# can stand still for seconds. A test that needed it is to be mended all the same. Some wait most of their time: there are two
# processes more than there are cores.
suite: $(VENV)/.collected $(VENV)/.compiled $(VENV)/.searches $(VENV)/.browser  ## the tests alone
	@$(PYTEST) -n 4 --dist loadfile --no-loadscope-reorder --reruns 2 --reruns-delay 1 --rerun-show-tracebacks -rfER

test-slow: setup $(VENV)/.searches  ## what the suite leaves out for its time: more variants and examples, and some promises between real processes
	@$(PYTEST) -n 2 --dist loadfile --thorough -m 'slow or hypothesis'

# Environments without what only developers have, as a trainer's host is. torchtitan's data sets ask for an older fsspec than the
# preprocessor does: it is installed first, and works with the newer one, of which pip warns.
INTEGRATIONS := .venv-integrations
TORCHTITAN := .venv-torchtitan
TESTERS := pytest pytest-asyncio pytest-timeout hypothesis
test-integrations:  ## train by the loops of other libraries and beside a Ray cluster, kill them and go on, in two environments, which it makes
	@test -x $(INTEGRATIONS)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS)
	@$(INTEGRATIONS)/bin/pip install --quiet --disable-pip-version-check 'pip>=25'
	@$(INTEGRATIONS)/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[preprocessor,trainer,integrations,ray]' $(TESTERS)
	@$(INTEGRATIONS)/bin/python -m compileall -qq -j 0 -x /tests/ $(INTEGRATIONS)/lib $(PORTIONS) || true
	@test -x $(TORCHTITAN)/bin/python || $(PYTHON) -m venv $(TORCHTITAN)
	@$(TORCHTITAN)/bin/pip install --quiet --disable-pip-version-check 'pip>=25'
	@grep -v '^fsspec==' constraints.txt > $(TORCHTITAN)/constraints.txt
	@$(TORCHTITAN)/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint $(TORCHTITAN)/constraints.txt --editable '.[trainer]' torchtitan==0.3.0 triton $(TESTERS)
	@$(TORCHTITAN)/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[preprocessor]'
	@$(TORCHTITAN)/bin/python -m compileall -qq -j 0 -x /tests/ $(TORCHTITAN)/lib || true
	@$(INTEGRATIONS)/bin/pytest -m slow tests/frameworks --ignore tests/frameworks/test_torchtitan.py
	@$(TORCHTITAN)/bin/pytest -m slow tests/frameworks/test_torchtitan.py

test-deploy: setup  ## run deploy/ on what is installed here: Slurm (as root), KUBEBUILDER_ASSETS=FOLDER of kube-apiserver and etcd, promtool, SKYPILOT_PYTHON=PYTHON; PART=slurm alone, which then has to be here (ten minutes)
	@HEADRACE_DEPLOY_PART=$(PART) $(PYTEST) -m slow -rs tests/deploy $(if $(PART),-k $(PART))

# Made again when the wheel is another one, which takes what README.md says of disk and time.
STRANGER := $(CURDIR)/build/stranger
test-tutorials: setup  ## install the wheel in an empty environment and run README.md, docs/tutorials and docs/orchestrate.md there word for word, and the loops of docs/coming-from here (a quarter of an hour)
	@$(BIN)/python -m tests.tutorials.empty_environment $(STRANGER)
	@HEADRACE_TEST_EMPTY_ENVIRONMENT=$(STRANGER) $(PYTEST) -m 'slow or not slow' tests/tutorials

unit: setup $(VENV)/.searches  ## the fast tests only
	@$(PYTEST) -n 3 --dist loadfile tests/unit tests/architecture

lint: style types layers  ## style, types and layers

style: $(VENV)/.installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

# Of all that `make test` does this takes longest beside the tests: it gets what they leave of the cores while they wait.
types: $(VENV)/.installed
	@nice -n 19 $(BIN)/mypy

layers: $(VENV)/.installed
	@$(BIN)/lint-imports --no-logo

format: setup  ## rewrite the sources in the project's style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

sbom: setup  ## list all that is installed in build/sbom.json (CycloneDX; half a minute)
	@mkdir -p build
	@$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --of JSON --output-file build/sbom.json $(BIN)/python
	@$(BIN)/python -c "import json; print(len(json.load(open('build/sbom.json'))['components']), 'packages in build/sbom.json')"

AUDIT := .venv-audit
audit: sbom  ## the same, and look what is pinned up among known vulnerabilities, which needs the network (a minute)
	@test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/pip install --quiet --disable-pip-version-check pip-audit; }
	@$(AUDIT)/bin/pip-audit --no-deps --disable-pip --requirement constraints.txt

RELEASE := .venv-release
release:  ## make of this commit what is published, in build/dist: built twice, tried in an empty environment, signed by RELEASE_KEY=KEY (or UNSIGNED=1; some minutes)
	@test -x $(RELEASE)/bin/twine || { $(PYTHON) -m venv $(RELEASE) && $(RELEASE)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt hatchling twine; }
	@$(RELEASE)/bin/python -m release --key '$(RELEASE_KEY)' $(if $(filter 1,$(UNSIGNED)),--unsigned)

compose-test: setup  ## prove compose.yaml on a real container engine
	@$(BIN)/python docker/compose_test.py

bench-planning: setup  ## measure the planner: one table of ours, published or peer, ratio, goal (about four minutes)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt prtpy || true
	@NUMBA_NUM_THREADS=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks.planning

bench-transport: setup  ## measure payload from process to process, beside a raw socket and a memcpy (under a minute)
	@$(BIN)/python -m benchmarks.transport

bench-preprocess: setup  ## measure preprocessing: codecs, delivery beside other loaders and from Ray, scaling, formats, memory (about 20 minutes)
	@$(BIN)/python -m benchmarks.preprocess

bench-loader: setup  ## measure our loader in other libraries' training loops, in groups of processes and after a restart (ten minutes)
	@$(BIN)/python -m benchmarks.loader

bench-recovery: setup  ## measure how soon work and training go on after a loss, beside torchft and a restart from a checkpoint (half an hour)
	@$(BIN)/python -m benchmarks.recovery

bench-pipeline: setup  ## measure EMULATED pipelines beside the simulator, and what runtime and data cost a trainer (ten minutes)
	@$(BIN)/python -m benchmarks.pipeline

bench-colocated: setup  ## measure plans for ranks that have all units, beside arrival order, LPT and pipeline plans (a minute)
	@NUMBA_NUM_THREADS=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks.colocated

bench-orchmllm: setup  ## measure plans for ranks that meet after every phase, beside what OrchMLLM's paper reports: steps of its models are SIMULATED, four small ranks train (four minutes)
	@NUMBA_NUM_THREADS=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks.orchmllm

bench-orchestrate: setup  ## measure searches for a placement and encoders in an LLM's bubbles, beside what papers report, and small placements, EMULATED and one trained for real: leave the machine alone meanwhile; all other steps are SIMULATED (some ten minutes)
	@NUMBA_NUM_THREADS=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks.orchestrate

bench-context: setup  ## measure context parallelism: distributions of blocks, a rank's attention, and SIMULATED steps with a degree for each sample (some minutes)
	@NUMBA_NUM_THREADS=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks.context

bench-forecast: setup  ## measure live jobs' forecast step time beside what their steps take: leave the machine alone meanwhile (eight minutes)
	@$(BIN)/python -m benchmarks.forecast

gpu-check: setup  ## check and measure the trainer on this machine's GPUs, or EMULATED on the CPU where there is none (eight minutes)
	@$(BIN)/python -m benchmarks.gpu

bench-deployment: setup  ## measure hosts (network namespaces, a quarter of a core each), and what mutual TLS takes; needs root (ten minutes)
	@$(BIN)/python -m benchmarks.deployment

bench-scale: setup  ## measure one reorder service beside 1,024 light ranks and 256 light preprocessors, and over 100,000 jobs (five minutes)
	@$(BIN)/python -m benchmarks.scale

bench-page: setup $(VENV)/.browser  ## measure what fifty viewers of the web page cost, and how soon it is painted: leave the machine alone meanwhile (six minutes)
	@$(BIN)/python -m benchmarks.page

bench-ray: setup  ## measure preprocessors on a Ray cluster: waits after a killed node (three minutes)
	@$(BIN)/python -m benchmarks.ray

simulate: setup  ## run the control plane in virtual time with faults drawn from seeds, and check every promise (ten minutes)
	@$(BIN)/python -m tests.simulation --minutes 10

bench-scale-large: setup  ## the same with 10,000 ranks and 2,000 preprocessors, for half an hour, and their leader killed (40 minutes, 16 GiB of memory)
	@$(BIN)/python -m benchmarks.scale --large

bench-ledger: setup  ## measure what 100 million committed samples take in the store (half an hour)
	@$(BIN)/python -m benchmarks.scale.ledger_growth

chaos: setup  ## kill, stop and cut off random processes of a real cluster, and compare ledgers (ten minutes)
	@$(BIN)/python -m tests.chaos --minutes 10

chaos-trainer: setup  ## lose nodes of recoverable jobs, those of two processes first, and compare weights and ledgers (as many cases as ten minutes hold)
	@$(BIN)/python -m tests.chaos_trainer --minutes 9.5

verify: setup $(VENV)/.compiled $(VENV)/.searches  ## compare pipelines (1,257 cases, each over gloo and over an emulation of NCCL's order, an hour), those whose ranks share sequences (120), FSDP ranks (877; these and those twenty minutes each) and context parallelism (518, a minute) with one process; PART=fsdp alone
	@$(BIN)/python -m tests.verify $(if $(PART),--part $(PART))

# A local version of torch (2.13.0+cpu) becomes the release, which any build of it satisfies; CUDA builds pin their own libraries.
lock: setup  ## pin what `make setup`, CI and the images install to the newest releases that pyproject.toml allows (two minutes)
	@$(BIN)/pip install --quiet --disable-pip-version-check pip-tools
	@CUSTOM_COMPILE_COMMAND='make lock' $(BIN)/pip-compile --quiet --upgrade --all-extras --strip-extras --no-annotate --no-emit-index-url \
		--no-emit-find-links --no-emit-trusted-host --output-file constraints.txt pyproject.toml
	@sed -i -e 's/+cpu$$//' -e '/^headrace @/d' constraints.txt

# Simulated, so that they are the same everywhere. docs/pictures/emulated.png and recovery.png come from runs: docs/pipeline.md and
# docs/recovery.md have their commands.
PICTURES := docs/pictures
pictures: setup  ## draw the simulated pictures of docs/pictures anew (two minutes)
	@mkdir -p build/pictures $(PICTURES)/strategies
	@$(BIN)/headrace compare examples/data --limit 96 --replicas 2 --microbatches 8 --stages encoder=1,llm=3 --out build/pictures --strategy-pictures $(PICTURES)/strategies > build/pictures.log
	@$(BIN)/headrace compare tests/data/costs/synthchart_512.parquet --replicas 4 --stages encoder=3,llm=5 --out $(PICTURES) >> build/pictures.log
	@$(BIN)/headrace inspect examples/data --costs build/pictures/example.parquet --out build/pictures >> build/pictures.log
	@$(BIN)/headrace simulate build/pictures/example.parquet --batch 64 --replicas 1 --microbatches 8 --stages encoder=1,llm=4 --dp encoder=4 --on-llm encoder --strategies joint --out build/pictures >> build/pictures.log
	@cp build/pictures/timeline-joint.png $(PICTURES)/shared_ranks.png
	@$(BIN)/headrace simulate-failures --mtbf 10m --nodes 30 --out $(PICTURES)/failures.png >> build/pictures.log

layouts: setup  ## write test data with other libraries, read them with their own readers, and store both (half an hour the first time)
	@$(BIN)/python -m tests.layouts.storing
	@$(BIN)/python -m tests.layouts

layouts-table: setup  ## rewrite docs/layouts.md from what becomes of the stored layouts now
	@$(BIN)/python -m tests.layouts

page-pictures: setup $(VENV)/.browser  ## draw docs/pictures/page-*.png from the recorded states of the page
	@$(BIN)/python -m tests.page

stubs: setup  ## generate proto/headrace/v1/*_pb2*.py from the .proto files
	@$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --pyi_out=proto --grpc_python_out=proto proto/headrace/v1/*.proto

.PHONY: page-pictures help setup lock demo sbom audit test suite test-slow test-integrations test-deploy unit lint style types layers format compose-test bench-planning bench-preprocess bench-loader bench-transport bench-recovery bench-pipeline bench-colocated bench-orchmllm bench-orchestrate bench-context bench-forecast bench-deployment gpu-check bench-scale bench-scale-large bench-ledger bench-page bench-ray simulate chaos chaos-trainer verify layouts layouts-table stubs docs links test-tutorials pictures release
