"""Rules of the house that a reader relies on: sizes, imports that point down, and what README and docs promise."""

import ast
import graphlib
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "maxghost"
FOLDERS = ("src", "tests", "benchmarks", "tools", "examples")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_CLASS_LINES = 250
MAX_LINES = 35_093

# A file may import its own package and those of a smaller number; packages of one number do not know each other.
FLOORS = {
  "config": 0, "parallel": 1, "models": 2, "data": 2, "scorelog": 2, "adapters": 3, "objectives": 4, "optimizers": 4,
  "serving": 4, "ghost": 5, "training": 6, "checkpoint": 6, "attribution": 7, "interop": 7,
}  # fmt: skip
COMMANDS = 8  # modules directly in the package: train.py, cli.py, ...

MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:home|root|work|tmp|opt|usr|mnt|Users)/[\w.-]+")


def short(path: Path) -> str:
  return str(path.relative_to(ROOT))


def functions(tree: ast.AST):
  return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def modules_imported(text: str) -> list[str]:
  """Dotted names under `maxghost.` that source text imports, anywhere in it; `from maxghost import x` counts as x."""
  names = []
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module == "maxghost":
      names += [f"maxghost.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
      names.append(node.module)
  return [name for name in names if name.startswith("maxghost.")]


def package_of(dotted: str) -> str:
  """ "models" of maxghost.models.stack; "" for the commands."""
  name = dotted.split(".")[1]
  return name if (PACKAGE / name).is_dir() else ""


def floor(package: str) -> int:
  return FLOORS[package] if package else COMMANDS


def upward_imports(text: str, package: str) -> list[str]:
  """What source text of `package` ("" for a command) imports that it must not."""
  found = {package_of(name): name for name in modules_imported(text)}
  return [name for other, name in found.items() if other != package and floor(other) >= floor(package)]


@pytest.mark.parametrize("path", SOURCES, ids=short)
def test_files_and_functions_are_short(path):
  text = path.read_text("utf-8")
  assert len(text.splitlines()) < MAX_FILE_LINES
  long = {node.name: node.end_lineno - node.lineno + 1 for node in functions(ast.parse(text))}
  assert {name: lines for name, lines in long.items() if lines >= MAX_FUNCTION_LINES} == {}
  classes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
  assert [node.name for node in classes if node.end_lineno - node.lineno + 1 > MAX_CLASS_LINES] == []


def test_the_package_is_small():
  assert sum(len(path.read_text("utf-8").splitlines()) for path in PACKAGE.rglob("*.py")) <= MAX_LINES


def test_the_matrix_names_tests_that_exist():
  tests = {path.name: path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
  lines = [line for line in (ROOT / "tests" / "matrix.txt").read_text("utf-8").splitlines() if "::" in line]
  split = [re.fullmatch(r"(\w+\.py)::(\w*)([*\[].*)?", line) for line in lines]
  assert [line for line, found in zip(lines, split, strict=True) if not found] == []
  assert [m[0] for m in split if m and f"\ndef {m[2]}" not in tests.get(m[1], "")] == []


def test_every_package_has_a_floor():
  packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
  assert packages == set(FLOORS)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=short)
def test_imports_point_down(path):
  package = path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else ""
  assert upward_imports(path.read_text("utf-8"), package) == []


@pytest.mark.parametrize(
  ("package", "text"),
  [
    ("models", "from maxghost.ghost import probed"),
    ("ghost", "def f():\n  from maxghost import training"),
    ("training", "import maxghost.checkpoint.manager"),
    ("config", "from maxghost.parallel import mesh"),
    ("data", "from maxghost.models.stack import run"),
    ("attribution", "from maxghost import cli"),
  ],
)
def test_an_import_that_points_up_is_found(package, text):
  assert len(upward_imports(text, package)) == 1


def imported_by(statement: str, *names: str) -> list[str]:
  """Which of the modules `names` are loaded in a fresh Python after `statement`."""
  code = f"{statement}\nimport sys\nprint(*[name for name in {names!r} if name in sys.modules])"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
  return done.stdout.split()


def test_training_needs_neither_tensorflow_nor_torch():
  modules = "maxghost.train, maxghost.report, maxghost.data, maxghost.ghost, maxghost.training.session"
  late = (
    "tensorflow",
    "torch",
    "tensorflow_datasets",
    "pyarrow",
    "pandas",
    "datasets",
  )  # what only some runs use
  loaded = imported_by(f"import {modules}, maxghost.checkpoint.manager", *late, "jax")
  assert loaded == ["jax"]


def test_a_wrong_key_is_reported_without_jax():
  statement = "import maxghost.train as command\nassert command.main(['base_emb_dmi=1']) == 2"
  assert imported_by(statement, "jax", "flax", "rich", "maxghost.config") == ["maxghost.config"]


@pytest.mark.parametrize("name", ["config", "data", "scorelog", "attribution"])
def test_packages_for_the_host_do_not_import_jax(name):
  assert imported_by(f"import maxghost.{name}", "jax") == []


def set_up_commands() -> list[str]:
  """The README's commands that create an environment, one line each."""
  text = (ROOT / "README.md").read_text("utf-8")
  lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.S) for line in block.splitlines()]
  return [line for line in lines if "-m venv" in line]


def test_readme_has_exactly_two_set_up_commands():
  """One trains, one tests; each is a single line that makes its own environment."""
  trains, tests = set_up_commands()
  for command in (trains, tests):
    assert command.startswith("python3 -m venv ")
    assert "pip install" in command and " && " in command and not command.endswith("\\")
  assert "-m maxghost.train configs/base.yml" in trains and "pytest" not in trains
  assert command.endswith("-m pytest") and "[dev]" in tests


def test_commands_in_the_texts_exist():
  """Scripts and modules that README and docs tell people to run are in the repository."""
  missing = []
  for path in TEXTS:
    text = path.read_text("utf-8")
    for script in re.findall(r"python3? ((?:benchmarks|tools)/\w+\.py)", text):
      missing += [] if (ROOT / script).is_file() else [f"{path.name}: {script}"]
    for module in re.findall(r"-m (maxghost(?:\.\w+)*)", text):
      base = ROOT / "src" / module.replace(".", "/")
      found = base.with_suffix(".py").is_file() or (base / "__main__.py").is_file()
      missing += [] if found else [f"{path.name}: {module}"]
  assert missing == []


@pytest.mark.parametrize("path", TEXTS, ids=short)
def test_texts_name_no_paths_of_a_machine_and_link_to_files_that_exist(path):
  text = path.read_text("utf-8")
  assert MACHINE_PATHS.findall(text) == []
  links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
  assert [link for link in links if not (path.parent / link).exists()] == []
  anchors = re.findall(r"\]\(([\w/.-]*\.md)#([\w-]+)\)", text)
  assert [anchor for anchor in anchors if anchor[1] not in headings(path.parent / anchor[0])] == []


def headings(path: Path) -> list[str]:
  """The anchors of a page, as GitHub writes them."""
  titles = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.M)
  return [re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles]


def test_modules_that_the_architecture_names_exist():
  named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text("utf-8"))
  known = [short(path) for path in SOURCES]
  assert [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in known)] == []


def test_every_page_is_linked_from_the_readme():
  text = (ROOT / "README.md").read_text("utf-8")
  assert [path.name for path in (ROOT / "docs").glob("*.md") if f"](docs/{path.name})" not in text] == []


def words(text):
  """What a reader reads: without comments, addresses of links and rules of tables."""
  text = re.sub(r"<!--.*?-->|^\|[-|: ]+\|$", "", text, flags=re.S | re.M)
  text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", text)
  return [word for word in text.replace("|", " ").split() if re.search(r"\w", word)]


def test_readme_and_pages_are_short():
  """At most 900 words, and at most 1,500 on a page besides its tables and its code."""
  assert len(words((ROOT / "README.md").read_text("utf-8"))) <= 900
  long = {}
  for path in (ROOT / "docs").glob("*.md"):
    text = re.sub(r"```.*?```|^\|.*?$", "", path.read_text("utf-8"), flags=re.S | re.M)
    long |= {path.name: len(words(text))} if len(words(text)) > 1500 else {}
  assert long == {}


def test_figures_of_the_readme_are_those_the_benchmarks_wrote():
  """To renew them: `python benchmarks/readme_table.py`."""
  done = subprocess.run(
    [sys.executable, "benchmarks/readme_table.py", "--check"], cwd=ROOT, capture_output=True, text=True
  )
  assert (done.returncode, done.stderr) == (0, "")


def test_every_dependency_has_its_reason():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
  extras = project["optional-dependencies"]
  listed = [*project["dependencies"], *(name for names in extras.values() for name in names)]
  names = {re.split(r"[\[<>=!~; ]", requirement)[0] for requirement in listed}
  reasons = (ROOT / "docs" / "dependencies.md").read_text("utf-8")
  assert {name for name in names if not re.search(rf"\b{re.escape(name)}\b", reasons)} == set()
  assert [extra for extra in extras if f"`{extra}`" not in reasons] == []


PUBLIC = (
  "attribution",
  "checkpoint",
  "config",
  "data",
  "ghost",
  "interop",
  "models",
  "objectives",
  "optimizers",
  "serving",
)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_exported_name_exists_and_has_a_page(name):
  """`from maxghost import ghost` and the like: __all__ is sorted, importable and rendered by docs/api."""
  package = importlib.import_module(f"maxghost.{name}")
  assert sorted(package.__all__) == sorted(set(package.__all__)) and package.__all__
  assert all(hasattr(package, one) for one in package.__all__)
  assert f"::: maxghost.{name}\n" in (ROOT / "docs" / "api" / f"{name}.md").read_text("utf-8")


def test_code_of_the_docs_imports_names_that_exist():
  """`from maxghost... import ...` in README and docs."""
  texts = [re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), re.S) for path in TEXTS]
  lines = {
    line
    for blocks in texts
    for block in blocks
    for line in re.findall(r"^(?:from maxghost|import maxghost).*", block, re.M)
  }
  assert len(lines) > 4
  for line in sorted(lines):
    exec(line.partition("#")[0], {})


@pytest.mark.slow
def test_the_site_of_the_docs_builds(tmp_path):
  """Every page, link and docstring; needs the `docs` extra."""
  pytest.importorskip("mkdocstrings", reason="the docs extra is not installed")
  command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert "maxghost.ghost.GhostEngine" in (tmp_path / "site" / "api" / "ghost" / "index.html").read_text("utf-8")


MAX_PARAMETERS = 10


def parameters_over(text: str) -> list[str]:
  """Functions of source text with more than MAX_PARAMETERS parameters, self and cls not counted."""
  found = []
  for node in functions(ast.parse(text)):
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    names += [a.arg for a in (node.args.vararg, node.args.kwarg) if a is not None]
    found += [node.name] if len([name for name in names if name not in ("self", "cls")]) > MAX_PARAMETERS else []
  return found


def test_no_function_has_too_many_parameters():
  found = {short(path): parameters_over(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
  assert {path: names for path, names in found.items() if names} == {}
  nine = "a, b, c, d, e, f, g, h, i"
  assert parameters_over(f"def f(self, {nine}, *j): pass\ndef g({nine}, *j, **k): pass") == ["g"]


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
  """{module: modules of `sources` that it imports, inside of functions too}."""
  graph = {}
  for module, text in sources.items():
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.Import):
        names |= {alias.name for alias in node.names}
      elif isinstance(node, ast.ImportFrom) and node.module:
        own = {f"{node.module}.{alias.name}" for alias in node.names}
        names |= {name if name in sources else node.module for name in own}
    graph[module] = names & sources.keys()
  return graph


def test_no_module_imports_another_in_a_circle():
  sources = {}
  for path in PACKAGE.rglob("*.py"):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    sources[".".join(parts).removesuffix(".__init__")] = path.read_text("utf-8")
  tuple(graphlib.TopologicalSorter(import_graph(sources)).static_order())  # CycleError names the circle
  with pytest.raises(graphlib.CycleError):
    circle = {"m": "import m.a", "m.a": "def f():\n  from m import b", "m.b": "from m.a import f"}
    tuple(graphlib.TopologicalSorter(import_graph(circle)).static_order())
