"""State that forwards leave beside their results: recorded, compared and restored.

Trial forwards, recompute and inspections run user code a second time and must leave no trace of it.

attributes       attributes and buffers of modules at a moment
buffers          buffers by name
hook_tables      hooks of modules
settling         what a first forward builds once
outside          globals, closures, class attributes and objects
elsewhere        their values at a moment
grown            attributes that classes and functions get meanwhile
libraries        packages whose code is not searched
generators       random generators made by user code
arrays           memory outside of torch that code may write into
slots            attributes of objects that are kept in slots
random_states    random states of torch, Python and NumPy
undisturbed      trial forwards that leave no trace
mirror           attributes of a module and of its copies in other threads
plain_objects    objects and containers that modules refer to
kept_parameters  parameters that trial forwards write
assigned         parameters whose values the model's own code sets
reached_code     names that forwards, hooks and the loss look up
iterators        iterators that cannot be rewound
copied_iterators iterators of which a copy stands in
class_identity   code that asks whether a module has exactly this class

To restore another kind of state, touch `outside.py`.
"""

__all__: list[str] = []
