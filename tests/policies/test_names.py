"""Names of policies: one layout may have two, each of which prints and is found as itself."""

import pytest

import policies


@pytest.mark.parametrize("fields", [{}, {"workers": 2, "learners": 3}])
@pytest.mark.parametrize("count", [1, 5, 8])
def test_environments_is_single_learner_fine_by_another_name(fields, count):
    fine, environments = policies.SingleLearnerFine(**fields), policies.Environments(**fields)
    assert environments != fine and repr(environments) == repr(fine).replace(
        "SingleLearnerFine", "Environments"
    )
    assert policies.get("environments") is policies.Environments
    assert policies.get("single_learner_fine") is policies.SingleLearnerFine
    assert environments.place(["cpu"] * count) == fine.place(["cpu"] * count)
