"""Names of policies: two policies with one layout print and are found by their own names."""

import pytest

import policies


@pytest.mark.parametrize("fields", [{}, {"workers": 2, "learners": 3}])
@pytest.mark.parametrize("count", [1, 5, 8])
def test_environments_has_the_layout_of_single_learner_fine(fields, count):
    fine, environments = policies.SingleLearnerFine(**fields), policies.Environments(**fields)
    assert environments != fine and repr(environments) == repr(fine).replace(
        "SingleLearnerFine", "Environments"
    )
    assert policies.get("environments") is policies.Environments
    assert policies.get("single_learner_fine") is policies.SingleLearnerFine
    assert environments.place(["cpu"] * count) == fine.place(["cpu"] * count)
