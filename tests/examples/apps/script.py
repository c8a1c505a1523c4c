"""A plain script with a switch for each way to end: ``script.py MODE FOLDER``."""

import os
import sys
import time
from pathlib import Path

from tiny import Tiny, loader, trainer, write_down

mode, folder = sys.argv[1], Path(sys.argv[2])
rank = int(os.environ.get("LOCAL_RANK", "0"))
(folder / f"pid{rank}").write_text(str(os.getpid()))

if mode == "three-trainers":
    for number in range(2):
        trained = trainer()
        trained.fit(Tiny(), loader())
        (folder / str(number)).mkdir(exist_ok=True)
        write_down(folder / str(number), trained)
    trainer(devices=3).fit(Tiny(), loader())
elif mode == "fail-rank-1":
    trainer(max_steps=20).fit(Tiny(fail_on_rank=1), loader())
elif mode == "fail-rank-0":
    trainer(max_steps=20).fit(Tiny(fail_on_rank=0), loader())
elif mode == "forever":

    class Marked(Tiny):
        def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
            if batch_idx == 3 and rank == 0:
                (folder / "step3").touch()

    trainer(max_steps=-1, max_epochs=-1).fit(Marked(), loader(workers=1))
elif mode == "two-nodes":
    trained = trainer(num_nodes=2)
    trained.fit(Tiny(), loader())
    write_down(folder, trained)
elif mode == "slow-import":
    if rank:
        time.sleep(60)  # before any of our code runs in the child
    trainer().fit(Tiny(), loader())
elif mode == "stuck-child":
    trainer().fit(Tiny(), loader())
    if rank:
        time.sleep(60)
elif mode == "fails-after":
    trainer().fit(Tiny(), loader())
    if rank:
        sys.exit(7)
elif mode == "stuck-main":
    trained = trainer(max_steps=20)
    if rank:
        os._exit(5)

    class Stuck(Tiny):
        def on_fit_start(self) -> None:
            time.sleep(60)

    trained.fit(Stuck(), loader())
else:
    raise SystemExit(f"unknown mode {mode}")
