"""State that forwards leave beside their results: read, compared and put back.

attributes       attributes and buffers of modules at a moment
buffers          buffers by name
outside          globals, closures, class attributes and objects
generators       random generators of the user's own
random_states    the random state of torch, Python and NumPy
undisturbed      trial forwards that leave no trace
mirror           attributes of a module and of its copies in other threads
plain_objects    objects and containers that modules refer to
kept_parameters  what trial forwards write into parameters
iterators        iterators that nobody can wind back

To put back another kind of state: `outside.py`.
"""

__all__: list[str] = []
