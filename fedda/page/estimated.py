"""What the models are worth without labels: estimates of accuracy, and validators."""

from fedda.results import worth as known

from .html import Html
from .parts import note, section, table
from .series import RunSeries


def worth(run: RunSeries) -> Html | None:
    """Make the section of estimates and validators; None if no training says anything."""
    head, rows = known.rows(run.results)
    if not rows:
        return None
    made = table(head, rows, label="What the models are worth, without labels")
    remarks = [note(f"{text[0].upper()}{text[1:]}.") for text in known.remarks(run.results)]
    return section("worth", "Worth without labels", made, *remarks)
