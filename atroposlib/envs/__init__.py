"""The environment framework: `base` holds what an environment imports, `server_handling` its inference clients.

base.py ── base_env.py     what an author extends       config.py, payloads.py   what is configured, what is sent
           environment.py  what of it is called         worker_pool.py           the groups being sampled
           run.py          what is known of one run
           serve.py        the loop of `serve`          pacing.py    when to sample and to evaluate (pure)
           process.py      `process`                    api_link.py                  the batching API
           cli.py          commands, flags, signals     metrics.py, records.py, html_report.py   what is written
"""
