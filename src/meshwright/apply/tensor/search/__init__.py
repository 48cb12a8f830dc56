"""Search for a layout: from a model and its first batch to regions. What is not proven stays whole, with the reason.

A trace proposes pairs of products; candidates for each are tried in order until one is proven.

trace       one forward of the plain model: which operation feeds which
meetings    tensors of different products that meet entry by entry
operations  torch functions classified by their use of a parameter
pairs       pairs of products that might be cut
candidates  ways to cut a pair, in the order of trial
joint_proofs  pairs of one large module, proven in one experiment
surroundings  what is cut around a region, and code elsewhere that uses its tensors
tried       regions that were tried, and why each failed
other_sizes ways that failed in a scope of the same code and other sizes
fewer_rows  calls with fewer rows, on which most wrong regions fail
narrowing   torch's own layers with fewer rows, for proofs of a vocabulary
other_layers  layers whose weight no product takes as it is
remainder   how much stays whole, and which small layers come next
kept_parts  weights that no layer can be cut by
passed_on   results that a scope passes on to scopes that are the same
failed_work  how many functions failed proofs may run
deadline    when a search ends with an error, since other ranks wait
regions     trial of candidates until one is proven
proven_calls  calls under which the cuts of a part are proven
sequences   layers that run on slices of the sequence
search      the whole search

To add a kind of pair, touch `pairs.py`; to add a way to cut one, touch `candidates.py`.
"""

__all__: list[str] = []
