"""The environment framework: `base` holds what an environment imports, `server_handling` its inference clients.

base.py ── environment.py  what an author extends       config.py, payloads.py   what is configured, what is sent
                           and one run of it            worker_pool.py           the groups being sampled
           serve.py        the loop of `serve`          pacing.py    when to sample and to evaluate (pure)
           process.py      `process`                    api_link.py                  the batching API
           cli.py          commands, flags, signals     metrics.py, records.py, html_report.py   what is written
"""
