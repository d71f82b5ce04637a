"""Keeps skips of one name apart."""

import uuid
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Namespace:
    """Skips isolated in different namespaces may have the same name; a copy is the same one."""

    id: uuid.UUID = field(default_factory=uuid.uuid4)
