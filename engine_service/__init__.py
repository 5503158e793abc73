"""One process per model replica: sockets, scheduler, block pool, model runner, sampler."""
