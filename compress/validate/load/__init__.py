"""The load generator: requests with seeded lengths, tokens and arrivals, served by an engine in this process
or by a server, and what that took.

    lengths.py        the law of prompt and output lengths
    arrivals.py       when requests arrive: Poisson, in bursts, all at once, or as clients get free
    trace.py          reads arrivals and lengths that were recorded elsewhere
    workload.py       the requests of one run with their arrivals
    workload_file.py  reads a workload whose tokens are fixed, and checks their digest
    served.py         what a target gives back: times of tokens, samples of the engine
    target.py         what serves a workload, and the clock it runs on
    engine_target.py  the bundled engine, in this process
    url_target.py     a server with the completions interface of OpenAI
    http_stream.py    its connections; completion_chunks.py reads its events
    objectives.py     limits that a good request keeps
    metrics.py        the numbers of one run, under the names of `vllm bench serve`
    compare.py        several targets on the same requests, in turn
    page.py           a sweep as one HTML page; pictures.py draws it
"""
