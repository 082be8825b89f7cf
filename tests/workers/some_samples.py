"""A part of what is packed."""

from collections.abc import Sequence

from corral.workers.data.sequence_sample import SequenceSample


def some_of(sample: SequenceSample, uids: Sequence[str]) -> SequenceSample:
    """The samples with these uids, in the order asked for; all keys stay, also without any."""
    parts = {part.uids[0]: part for part in sample.unpack()}
    return SequenceSample.gather([parts[uid] for uid in uids], keys=sample.seqlens, specs=sample.specs)
