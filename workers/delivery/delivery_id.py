"""Delivery ids: one name for each time that a sample is generated.

A sample whose trajectory came too late is generated again under the same uid. The trajectory stream remembers what it
has refused, so each generation travels under a name of its own: the uid and its admission number, "0:problem-17#412".
"""


def delivery_id(uid: str, order: int) -> str:
    """The name under which this generation of a sample is delivered."""
    return f"{uid}#{order}"


def uid_of_delivery(name: str) -> str:
    """The sample's uid."""
    return name.rpartition("#")[0]
