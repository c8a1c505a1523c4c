from tests.faults.runs import *
def mismatch(context, sizes, dtypes, sync=None):
    dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=3))
    config = SyncConfig(**{**SYNC, "timeout_s":3.0, **(sync or {})})
    events=EventStream(rank=context.rank)
    with contextlib.ExitStack() as stack:
        try:
            run = build.open_run(TopologyConfig(), config, events=events, device=torch.device("cpu"))
            stack.callback(run.close)
            ar = build.open_gradient_all_reduce(run, config)
            stack.callback(ar.close)
            t0=time.monotonic()
            t=torch.ones(sizes[context.rank], dtype=getattr(torch,dtypes[context.rank]))
            ar.all_reduce(t)
            return "none", str(t[:3])+str(t[-3:]), time.monotonic()-t0
        except Exception as e:
            return type(e).__name__, str(e), time.monotonic()-t0
