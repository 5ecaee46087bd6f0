"""What a site allows a server to do, and the site's own record of what crossed.

rules      the policy: a file of the site's, read by `fedda-client --policy`
describe   the policy in plain words
sizes      bounds on what a request may make a site build, with or without a policy
budget     what was used of the budgets, on the site's disk
gate       the decision about each request, before any work
audit_log  the audit log: every message in and out, without a value; beside a server's
"""
