"""Each rule of tools/check_style.py finds its fault, and leaves good code alone."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check_style.py"
LONG_BODY = "\n".join("    x = 1" for _ in range(60))
THREE_FIELDS = "class A:\n    x: int\n    y: int\n    z: int\n"
NINE = ", ".join(f"p{i}" for i in range(9))

BAD = {
    "plain class": ("class A:\n    x = 1\n", 1, "neither abstract nor @final"),
    "subclass of a concrete class": ("class A(B):\n    x = 1\n", 1, "neither abstract"),
    "nested class": ("def f():\n    class A: ...\n", 2, "neither abstract"),
    "positional bool": ("def f(x, flag: bool): ...\n", 1, "flag of f is a positional bool"),
    "default bool": ("def f(flag: bool = True): ...\n", 1, "is a positional bool"),
    "optional bool": ("def f(flag: bool | None): ...\n", 1, "is a positional bool"),
    "quoted bool": ("def f(flag: 'bool | None'): ...\n", 1, "is a positional bool"),
    "bool of a method": ("class A(ABC):\n    async def f(self, x: bool): ...\n", 2, "positional"),
    "bare dataclass": ("@final\n@dataclass\nclass A: ...\n", 2, "dataclass A is not frozen"),
    "half-frozen dataclass": ("@final\n@dataclass(kw_only=True)\nclass A: ...\n", 2, "frozen"),
    "positional dataclass": (f"@final\n@dataclass(frozen=True)\n{THREE_FIELDS}", 2, "kw_only"),
    "state without a reason": ("@final\n@dataclass  # state:\nclass A: ...\n", 2, "dataclass A"),
    "print": ("def f():\n    print('x')\n", 2, "print("),
    "long file": ("x = 1\n" * 801, 1, "801 lines"),
    "long function": (f"def f():\n{LONG_BODY}\n", 1, "f has 61 lines"),
    "many parameters": (f"def f({NINE}): ...\n", 1, "f has 9 parameters"),
    "many keywords": (f"def f(*, {NINE}): ...\n", 1, "f has 9 parameters"),
    "undocumented function": ("__all__ = ['f']\ndef f(): ...\n", 2, "f is in __all__"),
    "undocumented class": ("__all__ = ['A']\nclass A(ABC): ...\n", 2, "A is in __all__"),
    "call at import": ("import x\nx.set_flag(1)\n", 2, "side effect at import"),
    "call at import, nested": ("try:\n    f()\nexcept E:\n    g()\n", 2, "side effect at import"),
    "environment at import": ("import os\nX = os.environ['X']\n", 2, "environment is read"),
    "environment in a default": ("def f(x=os.getenv('X')): ...\n", 1, "environment is read"),
    "word in a docstring": ('"""One.\n\nTwo for nobody."""\n', 3, "'nobody' is not plain"),
    "word in a comment": ("x = 1\n# to whom\n", 2, "'whom' is not plain"),
    "word in a message": ("x = 'There'\ny = f'Somebody {x}'\n", 2, "'Somebody' is not plain"),
    "phrase over two lines": ('def f():\n    """It lasts for\n    ever."""\n', 2, "'for ever'"),
    "none": ("x = 'there is none'\n", 1, "'is none' is not plain"),
    "syntax error": ("def f(:\n", 1, "cannot be parsed"),
}

GOOD = {
    "final class": "@final\nclass A(B): ...\n",
    "qualified final": "@typing.final\nclass A: ...\n",
    "abstract class": "class A(abc.ABC): ...\n",
    "generic protocol": "class A(Protocol[T]): ...\n",
    "abstract method": "class A:\n    @abstractmethod\n    def f(self): ...\n",
    "metaclass": "class A(metaclass=ABCMeta): ...\n",
    "errors": "class AError(B): ...\nclass C(ValueError): ...\nclass D(E, TimeoutError): ...\n",
    "torch": "class A(nn.Module): ...\nclass B(torch.optim.Optimizer): ...\n",
    "enums": "class A(enum.Enum): ...\nclass B(StrEnum): ...\n",
    "typed containers": "class A(TypedDict): ...\nclass B(NamedTuple): ...\n",
    "keyword bool": "def f(x, *, flag: bool = False, other: 'bool | None'): ...\n",
    "names are not prose": "def nobody(door):\n    return crew.whom(f'{door.ward}')\n",
    "parts of words": "x = 'recommended, indoors, forward, forever, accompany'  # details\n",
    "None of Python": '"""The mean is None, and f returns None to say so."""\n',
    "bool returned": "def f(x: Callable[[int], bool]) -> bool: ...\n",
    "frozen dataclass": "@final\n@dataclasses.dataclass(frozen=True, kw_only=True)\nclass A: ...\n",
    "message": "@final\n@dataclass(frozen=True)\nclass A:\n    x: int\n    y: int\n",
    "state": "@final\n@dataclass  # state: counters of one run\nclass A: ...\n",
    "console": "def f(console):\n    console.print('x')\n",
    "full file": "x = 1\n" * 800,
    "full function": f"def f():\n{LONG_BODY[: LONG_BODY.rindex(chr(10))]}\n",
    "eight parameters": f"def f(self, {NINE.removesuffix(', p8')}): ...\n",
    "documented": "__all__ = ['f', 'g']\nfrom m import g\ndef f():\n    'Do it.'\ndef h(): ...\n",
    "docstrings": "'Module.'\nX = 1\n'What X is.'\n",
    "call in a function": "def f():\n    os.environ['X'] = '1'\n    g()\n",
    "main guard": "if __name__ == '__main__':\n    main()\n",
    "lazy lambda": "f = lambda: os.environ['X']\n",
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_style", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, text: str, name: str = "concept.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def findings_in(tool: ModuleType, path: Path) -> list[tuple[int, str]]:
    return [(line, message) for (_, line, message), _ in tool.check([path], strict=True)]


@pytest.mark.parametrize(("text", "line", "message"), BAD.values(), ids=BAD.keys())
def test_finds(tool: ModuleType, tmp_path: Path, text: str, line: int, message: str) -> None:
    findings = findings_in(tool, write(tmp_path, text))
    assert [at for at, said in findings if message in said][:1] == [line], findings
    assert all(message in said for _, said in findings), "one fault, one kind of finding"


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD.keys())
def test_leaves_alone(tool: ModuleType, tmp_path: Path, text: str) -> None:
    assert findings_in(tool, write(tmp_path, text)) == []


@pytest.mark.parametrize("name", ["utils.py", "helpers.py", "misc.py"])
def test_finds_vague_names(tool: ModuleType, tmp_path: Path, name: str) -> None:
    [(line, message)] = findings_in(tool, write(tmp_path, "x = 1\n", name))
    assert line == 1
    assert name in message


def test_every_rule_is_listed_and_seen_to_fail(tool: ModuleType) -> None:
    sources = [
        tool.Source(Path(name), text.splitlines(), tool.ast.parse(text))
        for name, text in [
            ("utils.py", ""),
            *((f"{case}.py", bad[0]) for case, bad in BAD.items() if case != "syntax error"),
        ]
    ]
    assert len(tool.RULES) == 11
    assert not [rule for rule in tool.RULES if not any(list(rule(source)) for source in sources)]


def test_class_names_are_unique_in_the_package(tool: ModuleType, tmp_path: Path) -> None:
    one = write(tmp_path, "class A(ABC): ...\nclass SGD(ABC): ...\n", "one.py")
    two = write(tmp_path, "\nclass A(ABC): ...\nclass SGD(ABC): ...\n", "two.py")
    [((path, line, message), rule)] = tool.check([one, two], strict=True)
    assert (path, line, rule) == (two, 2, "unique_class_names")
    assert f"also in {one}:1" in message
    assert len(tool.PACKAGE_RULES) == 1


def test_strict_asks_for_all_rules_and_counts(
    tool: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert {rule.__name__ for rule in (*tool.RULES, *tool.PACKAGE_RULES)} >= tool.ONLY_STRICT
    monkeypatch.setattr(tool, "ONLY_STRICT", {"plain_words"})
    write(tmp_path, "x = 'nobody'  # nobody\n")
    assert tool.main([str(tmp_path)]) == 0
    assert tool.main(["--strict", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "     2 plain_words\n"


def test_the_documentation_uses_plain_words(tool: ModuleType) -> None:
    root = TOOL.parents[1]
    history = {"log.md", "CHANGELOG.md"}  # what was written then, in the words of then
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    found = {p.name: list(tool.not_plain(p.read_text())) for p in pages if p.name not in history}
    assert not {name: findings for name, findings in found.items() if findings}


def test_main_prints_file_and_line(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deep").mkdir()
    path = write(tmp_path / "deep", "x = 1\nprint(x)\n")
    assert tool.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{path}:2 ")
    path.write_text("x = 1\n")
    assert tool.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""


def test_main_refuses_a_folder_without_files(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([str(tmp_path / "absent")]) == 2
    assert "no Python files" in capsys.readouterr().err
