"""What a task of Spark costs the Python worker that goes on to the next one."""

import subprocess
import sys

TASKS = """
import gc
from pyspark import TaskContext
from spark_pgqueue.spark.executor.reading import closing_after

def task():
    assert list(closing_after(iter([1]), None, None)) == [1]

task()
assert gc.get_freeze_count() == 0, "the driver's processes are left alone"
TaskContext._setTaskContext(TaskContext())  # as Spark's worker does before a task
task()
kept, followed = gc.get_freeze_count(), len(gc.get_objects())
assert kept > 10 * followed, f"a collection looks at {followed} objects, and passes over {kept}"
gc.collect()
rings = [[] for _ in range(1000)]
for ring in rings:
    ring.append(ring)
del ring
task()
del rings
assert gc.collect() >= 1000, "what comes later is collected"
assert gc.get_freeze_count() <= kept
"""


def test_a_worker_collects_garbage_between_tasks_without_looking_at_its_modules():
    done = subprocess.run([sys.executable, "-c", TASKS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
