"""Networks: the value network, the reference policy, and how a policy hears its condition."""
