"""Whether a mesh trains what one process of plain torch trains: losses, gradients, state, a resume.

`recording` is what the ranks of a mesh write down of a short run, `plain` the same steps by a plain
loop in one process, `compare` (pure) what differs and where it belongs; `checking` puts them
together for `trainer.verify` and `tonari verify`, of as many layers as `layers` finds room for.
`first_step` is the cheap form that `train` runs by itself.
"""
