"""A type checker knows the types of what `spark_pgqueue` exports, and no other names."""

import json
import subprocess
import sys
from pathlib import Path

import spark_pgqueue
from spark_pgqueue.worker.options import ListenOptions, Options, RunOptions

ROOT = Path(spark_pgqueue.__file__).parent.parent


def checked(folder: Path, text: str) -> list[dict]:
    """What pyright says of a program."""
    program = folder / "program.py"
    program.write_text(text)
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
    )
    return json.loads(done.stdout)["generalDiagnostics"]


WRONG = """from spark_pgqueue import Consumr
worker.run(print, concurency=2)
worker.listen(batch=1)
spark_pgqueue.handler("s", "c", concurrency="2")
"""


def test_a_type_checker_knows_names_and_options_and_refuses_misspelt_ones(tmp_path: Path):
    """Each exported name has a type; options of workers are known."""
    right = """import spark_pgqueue
worker = spark_pgqueue.Consumer("", "s", "c")
worker.run(print, concurrency=2, prefetch=1)
queue = spark_pgqueue.connect()
reveal_type(queue.receive('s', 'c'))
"""
    right += "".join(f"reveal_type(spark_pgqueue.{name})\n" for name in spark_pgqueue.__all__)
    said = checked(tmp_path, right + WRONG)
    errors = [each for each in said if each["severity"] == "error"]
    first = right.count("\n")
    assert {each["range"]["start"]["line"] - first for each in errors} == {0, 1, 2, 3}
    assert '"Consumr" is unknown import symbol' in [each["message"] for each in errors]
    types = [each["message"].split(" is ", 1)[1] for each in said if each not in errors]
    assert len(types) == len(spark_pgqueue.__all__) + 1
    assert not {'"Any"', '"Unknown"'} & set(types), said
    assert types[0] == '"Claim | None"'


def test_the_types_of_options_are_those_that_are_taken():
    taken = {name: field.type for name, field in Options.__dataclass_fields__.items()}
    typed = {name: of.__forward_arg__ for name, of in RunOptions.__annotations__.items()}
    assert typed == taken
    assert set(ListenOptions.__annotations__) < set(typed)


def test_each_exported_name_is_listed_and_exists():
    assert set(spark_pgqueue.__all__) <= set(dir(spark_pgqueue))
    for name in spark_pgqueue.__all__:
        assert getattr(spark_pgqueue, name) is not None, name


def test_all_names_are_imported_also_without_pyspark():
    code = """
import sys
sys.modules["pyspark"] = None
from spark_pgqueue import *
assert Consumer and watch and not "offsets" in globals()
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
