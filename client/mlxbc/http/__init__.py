"""Owns the OpenAI-compatible HTTP endpoint: another client of the daemon, for programs that speak only that.

Needs the extra `http`. The modules, from the pure ones outwards: `asked` is what such programs may send, `translate`
makes fields of `wire.Generate` of it, `replies` makes their JSON of the daemon's frames, `failures` of its errors;
`link` is the connection to the daemon, `answering` an answer on its way, `guard` who may ask, `app` the routes, and
`server` the process.
"""
