"""The real orchestrator on a virtual clock, with parts that only cost time: what a cluster would do, before it is paid for."""
