import sys; sys.path.insert(0, sys.argv[1])
import tests.benchmarks.compare.rate as R, tests.benchmarks.compare.compare as C
R.RATES=(300,)
import dataclasses
import tests.benchmarks.compare.__main__ as M
from tests.benchmarks.compare.sides import Ours
from tests.benchmarks.compare.pgmq import Pgmq
from pathlib import Path
def rate(compare):
    sides=[Ours(), *compare.sides(Pgmq())]
    found={}
    with compare.queues(sides):
        for _ in range(compare.effort.rounds):
            for side in sides:
                for what, seconds in R.turn(compare, side, 300).items():
                    found.setdefault(what, {}).setdefault(side.name, []).append(seconds*1e3)
                compare.vacuum(side)
    for what, v in found.items(): print(what, {k:[round(x,1) for x in vs] for k,vs in v.items()}, flush=True)
M.SCENARIOS={"rate":rate}
M.FULL=dataclasses.replace(C.FULL, rounds=3, rated=10)
if __name__ == "__main__": M.main(scenario=["rate"], quick=False, url=None, laboratory=False, out=Path("/tmp/rate_"+sys.argv[2]), readme=False)
