"""What this project's style asks for and no linter checks: `python tools/check_style.py src`.

Prints `file:line message` for each finding and exits with 1 if there are any.
One rule a function: it takes a `Source` and yields `(line, message)`; `RULES` lists them all. Rules
of `PACKAGE_RULES` take all files at once and yield `(path, line, message)`. Rules in `ONLY_STRICT`
are asked for by `--strict` alone, which also prints how often each rule was broken.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ONLY_STRICT: set[str] = set()
"""Rules that the tree does not keep yet."""

SHARED_CLASS_NAMES = {"AdamW", "SGD", "Muon", "SignSGD"}
"""Names that `inner`, `outer` and `optim` share on purpose: those of optimizers."""

PLAIN_WORDS = {
    r"whoever|whomever|whom": "say who: 'the worker that', 'a caller that'",
    r"nobody|somebody|everybody|anybody": "say who: 'no worker', 'a worker', 'all workers'",
    r"those who|none to": "say what: 'workers that', 'no worker to'",
    r"(?:is|are|was|were) none": "'does not exist', 'is missing', 'is not one'",
    r"for ever": "'permanently', 'without a limit', or a number",
    r"mend(?:s|ed|ing)?": "'repair' or 'fix'",
    r"ails|ailed|ailing": "'is wrong with'",
    r"nought|naught|thereof|hereby|wherever it may": "modern English",
    r"door|knock(?:s|ed|ing)?": "'registry', 'join'",
    r"voyage|crew|courier|errand|ward|company": "the field's word: 'round', 'workers', 'thread'",
}
"""What prose and messages may not say (any case but that of `None`), and what to say instead."""

FORBIDDEN_FILES = {"utils.py", "helpers.py", "misc.py"}
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
MAX_POSITIONAL_FIELDS = 2

ABSTRACT_BASES = {"ABC", "Protocol"}
ERROR_SUFFIXES = ("Error", "Exception", "Timeout", "Warning")
OPEN_BASES = {  # classes that other libraries ask one to subclass
    *("Module", "Optimizer"),
    *("Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"),
    *("TypedDict", "NamedTuple"),
}
STATE_REASON = re.compile(r"#\s*state:\s*\S")

Function = ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Finding = tuple[int, str]
Placed = tuple[Path, int, str]


class Source(NamedTuple):
    """One file: where it lies, its lines and its syntax tree."""

    path: Path
    lines: list[str]
    tree: ast.Module


def final_or_abstract(source: Source) -> Iterator[Finding]:
    """Every class is abstract or decorated with @final."""
    for node in _classes(source):
        if not (_is_final(node) or _is_abstract(node) or _is_open(node)):
            yield node.lineno, f"class {node.name} is neither abstract nor @final"


def keyword_only_bools(source: Source) -> Iterator[Finding]:
    """A yes-or-no parameter is a keyword-only bool, so that each call says what it says yes to."""
    for function in _functions(source):
        keywords = {parameter.arg for parameter in function.args.kwonlyargs}
        for parameter in _parameters(function):
            if _is_bool(parameter.annotation) and parameter.arg not in keywords:
                message = f"parameter {parameter.arg} of {function.name} is a positional bool"
                yield parameter.lineno, f"{message}: make it keyword-only"


def frozen_dataclasses(source: Source) -> Iterator[Finding]:
    """Dataclasses are frozen and keyword-only, unless their decorator says `# state: reason`.

    One with at most MAX_POSITIONAL_FIELDS fields may be positional: `AllGather(payload)` says all.
    """
    for node in _classes(source):
        fields = sum(isinstance(item, ast.AnnAssign) for item in node.body)
        for decorator in node.decorator_list:
            if _name(decorator) != "dataclass" or _is_marked_state(source, decorator):
                continue
            by_keyword = _has_true(decorator, "kw_only") or fields <= MAX_POSITIONAL_FIELDS
            if not (_has_true(decorator, "frozen") and by_keyword):
                message = "is not frozen=True, kw_only=True and has no '# state: reason' comment"
                yield decorator.lineno, f"dataclass {node.name} {message}"


def no_print(source: Source) -> Iterator[Finding]:
    """Nothing prints: the command line has a console, the library returns values."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Name(id="print")):
                yield node.lineno, "print( in the package"
            case _:
                pass


def no_vague_file_names(source: Source) -> Iterator[Finding]:
    """A file is named after its concept."""
    if source.path.name in FORBIDDEN_FILES:
        yield 1, f"a file named {source.path.name} has no concept: name it after one"


def short_files(source: Source) -> Iterator[Finding]:
    """A file is one thing that a reader wants whole; beyond MAX_FILE_LINES it is two things."""
    if len(source.lines) > MAX_FILE_LINES:
        message = f"{len(source.lines)} lines, more than {MAX_FILE_LINES}"
        yield 1, f"{message}: give the second thing in it a file of its own"


def short_functions(source: Source) -> Iterator[Finding]:
    """No function, docstring included, is longer than MAX_FUNCTION_LINES."""
    for function in _functions(source):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield function.lineno, f"{function.name} has {length} lines, over {MAX_FUNCTION_LINES}"


def few_parameters(source: Source) -> Iterator[Finding]:
    """No function has more than MAX_PARAMETERS parameters; `self` and `cls` do not count."""
    for function in _functions(source):
        count = sum(a.arg not in ("self", "cls") for a in _parameters(function))
        if count > MAX_PARAMETERS:
            yield function.lineno, f"{function.name} has {count} parameters, over {MAX_PARAMETERS}"


def public_docstrings(source: Source) -> Iterator[Finding]:
    """Every function and class that `__all__` names and the file defines has a docstring."""
    public = _exported_names(source.tree)
    for node in source.tree.body:
        if not isinstance(node, DEFINITIONS) or node.name not in public:
            continue
        if not ast.get_docstring(node):
            yield node.lineno, f"{node.name} is in __all__ and has no docstring"


def no_import_effects(source: Source) -> Iterator[Finding]:
    """Importing does nothing: no bare call at module level, no look at the environment."""
    for statement in _module_statements(source.tree.body):
        if isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant):
            yield statement.lineno, "a statement with a side effect at import"
    for node in _evaluated_at_import(source.tree):
        if _is_environment(node):
            yield getattr(node, "lineno", 1), "the environment is read at import"


def plain_words(source: Source) -> Iterator[Finding]:
    """Docstrings, comments and messages use the field's plain words: none of PLAIN_WORDS.

    A word counts as a whole, in any case; a phrase also across the end of a line. Names in code are
    not looked at, only what is in strings and comments.
    """
    for line, text in (*_strings(source), *_comments(source)):
        for lines_below, message in not_plain(text):
            yield line + lines_below, message


def not_plain(text: str) -> Iterator[Finding]:
    """Where PLAIN_WORDS stand in a text, in lines below its first, and what to say instead."""
    for pattern, instead in _PLAIN_PATTERNS:
        for found in pattern.finditer(text):
            said = " ".join(found.group().split())
            yield text.count("\n", 0, found.start()), f"'{said}' is not plain: {instead}"


def unique_class_names(sources: Sequence[Source]) -> Iterator[Placed]:
    """A class name means one thing in the whole package, except SHARED_CLASS_NAMES."""
    first: dict[str, str] = {}
    for source in sources:
        for node in _classes(source):
            place = f"{source.path}:{node.lineno}"
            if first.setdefault(node.name, place) != place and node.name not in SHARED_CLASS_NAMES:
                message = f"class {node.name} is also in {first[node.name]}: rename one"
                yield source.path, node.lineno, message


RULES: tuple[Callable[[Source], Iterator[Finding]], ...] = (
    final_or_abstract,
    keyword_only_bools,
    frozen_dataclasses,
    no_print,
    no_vague_file_names,
    short_files,
    short_functions,
    few_parameters,
    public_docstrings,
    no_import_effects,
    plain_words,
)

PACKAGE_RULES: tuple[Callable[[Sequence[Source]], Iterator[Placed]], ...] = (unique_class_names,)

_PLAIN_PATTERNS = [
    # "is None" is Python, "is none" is not plain: that pattern alone is case-sensitive.
    (re.compile(rf"\b(?:{words})\b".replace(" ", r"\s+"), 0 if "none" in words else re.I), instead)
    for words, instead in PLAIN_WORDS.items()
]


def _classes(source: Source) -> list[ast.ClassDef]:
    return [node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]


def _functions(source: Source) -> list[Function]:
    return [node for node in ast.walk(source.tree) if isinstance(node, Function)]


def _parameters(function: Function) -> list[ast.arg]:
    arguments = function.args
    starred = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *starred]


def _name(node: ast.expr) -> str:
    """The last part of a name: `dataclass` for `dataclasses.dataclass(...)`, `A` for `b.A[T]`."""
    match node:
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _name(inner)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


def _is_final(node: ast.ClassDef) -> bool:
    return any(_name(decorator) == "final" for decorator in node.decorator_list)


def _is_abstract(node: ast.ClassDef) -> bool:
    if any(_name(base) in ABSTRACT_BASES for base in node.bases):
        return True
    if any(k.arg == "metaclass" and _name(k.value) == "ABCMeta" for k in node.keywords):
        return True
    methods = [item for item in node.body if isinstance(item, Function)]
    return any(_name(d) == "abstractmethod" for method in methods for d in method.decorator_list)


def _is_open(node: ast.ClassDef) -> bool:
    bases = {_name(base) for base in node.bases}
    is_error = any(name.endswith(ERROR_SUFFIXES) for name in (node.name, *bases))
    return is_error or bool(bases & OPEN_BASES)


def _strings(source: Source) -> Iterator[tuple[int, str]]:
    """Every string, docstrings and the fixed parts of f-strings included, with its first line."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _comments(source: Source) -> Iterator[tuple[int, str]]:
    text = io.StringIO("\n".join(source.lines) + "\n")
    for token in tokenize.generate_tokens(text.readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _is_bool(annotation: ast.expr | None) -> bool:
    """`bool`, `"bool"`, `bool | None`, `Optional[bool]`; not `Callable[..., bool]`."""
    match annotation:
        case ast.Constant(value=str(text)):
            return _is_bool(ast.parse(text, mode="eval").body)
        case ast.BinOp(left=left, right=right):
            return _is_bool(left) or _is_bool(right)
        case ast.Subscript(value=outer, slice=inner) if _name(outer) in ("Optional", "Annotated"):
            return _is_bool(inner.elts[0] if isinstance(inner, ast.Tuple) else inner)
        case ast.Name(id="bool"):
            return True
        case _:
            return False


def _has_true(decorator: ast.expr, keyword: str) -> bool:
    keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
    return any(
        k.arg == keyword and isinstance(k.value, ast.Constant) and k.value.value is True
        for k in keywords
    )


def _is_marked_state(source: Source, decorator: ast.expr) -> bool:
    last = decorator.end_lineno or decorator.lineno
    return any(STATE_REASON.search(line) for line in source.lines[decorator.lineno - 1 : last])


def _exported_names(tree: ast.Module) -> set[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(_name(t) == "__all__" for t in node.targets):
            return {c.value for c in ast.walk(node.value) if isinstance(c, ast.Constant)}
    return set()


def _module_statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run at import, also those under `if`, `try`, `for` and `with`."""
    for statement in body:
        yield statement
        if isinstance(statement, DEFINITIONS) or _is_main_guard(statement):
            continue
        yield from _module_statements(_nested_statements(statement))


def _nested_statements(statement: ast.stmt) -> Iterator[ast.stmt]:
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.stmt):
            yield node
        elif isinstance(node, (ast.ExceptHandler, ast.match_case)):
            yield from node.body


def _is_main_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test).startswith("__name__ ==")


def _evaluated_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that is evaluated when the module is: bodies of functions are not."""
    yield node
    if isinstance(node, ast.stmt) and _is_main_guard(node):
        return
    for child in _children_at_import(node):
        yield from _evaluated_at_import(child)


def _children_at_import(node: ast.AST) -> Iterable[ast.AST]:
    if isinstance(node, ast.Lambda):
        return []
    if isinstance(node, Function):
        defaults = [d for d in (*node.args.defaults, *node.args.kw_defaults) if d is not None]
        return [*node.decorator_list, *defaults]
    return ast.iter_child_nodes(node)


def _is_environment(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="environ" | "getenv") | ast.Name(id="environ" | "getenv"):
            return True
        case _:
            return False


def read(path: Path) -> Source:
    """The file at `path`, parsed; raises SyntaxError."""
    text = path.read_text(encoding="utf-8")
    return Source(path, text.splitlines(), ast.parse(text, filename=str(path)))


def check(files: Iterable[Path], *, strict: bool = False) -> list[tuple[Placed, str]]:
    """All findings by file and line, each with the name of its rule."""
    left_out = set[str]() if strict else ONLY_STRICT
    found: list[tuple[Placed, str]] = []
    sources: list[Source] = []
    for path in files:
        try:
            sources.append(read(path))
        except SyntaxError as error:
            found.append(((path, error.lineno or 1, f"cannot be parsed: {error.msg}"), "syntax"))
    for rule in RULES:
        if rule.__name__ not in left_out:
            found += [((s.path, *one), rule.__name__) for s in sources for one in rule(s)]
    for rule in PACKAGE_RULES:
        if rule.__name__ not in left_out:
            found += [(placed, rule.__name__) for placed in rule(sources)]
    return sorted(found)


def main(arguments: Sequence[str]) -> int:
    """Check the files under the given folders; 1 if there is a finding, 2 if there is no file."""
    parser = argparse.ArgumentParser(description="What no linter checks.")
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--strict", action="store_true", help="all rules, and a count of each")
    chosen = parser.parse_args(arguments)
    files = sorted(file for folder in chosen.folders for file in folder.rglob("*.py"))
    if not files:
        said = " ".join(map(str, chosen.folders))
        print(f"no Python files under {said}: pass folders, such as src", file=sys.stderr)
        return 2
    findings = check(files, strict=chosen.strict)
    for (file, line, message), _ in findings:
        print(f"{file}:{line} {message}")
    if chosen.strict:
        for rule, count in Counter(rule for _, rule in findings).most_common():
            print(f"{count:6} {rule}", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
