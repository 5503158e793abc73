"""Which URL under `/admin` is answered by whom."""

from __future__ import annotations

from aiohttp import web

from gateway.admin.access import AdminAccess
from gateway.admin.audit import AuditEndpoint
from gateway.admin.entries import EntriesEndpoint
from gateway.admin.experiments import ExperimentsEndpoint
from gateway.admin.keys import KeysEndpoint
from gateway.admin.policy import PolicyEndpoint
from gateway.admin.status import StatusEndpoint
from gateway.admin.usage import UsageEndpoint
from gateway.services import Services


def admin_routes(services: Services) -> list[web.RouteDef]:
    access = AdminAccess(services)
    status = StatusEndpoint(services, access)
    tenants, routes = (
        EntriesEndpoint(services, access, "tenant"),
        EntriesEndpoint(services, access, "route"),
    )
    policy = PolicyEndpoint(services, access, tenants, routes)
    keys = KeysEndpoint(services, access)
    return [
        web.get("/admin/status", status.status),
        web.post("/admin/prefix-cache/reset", status.reset_prefix_cache),
        web.get("/admin/policy", policy.get),
        web.get("/admin/experiments", ExperimentsEndpoint(services, access).list_all),
        web.get("/admin/audit", AuditEndpoint(services, access).list),
        web.get("/admin/usage", UsageEndpoint(services, access).sums),
        web.get("/admin/keys", keys.list_all),
        web.post("/admin/keys", keys.create),
        web.get("/admin/keys/{key_id}", keys.get),
        web.patch("/admin/keys/{key_id}", keys.update),
        web.post("/admin/keys/{key_id}/rotate", keys.rotate),
        web.post("/admin/keys/{key_id}/retire", keys.retire),
        web.post("/admin/keys/{key_id}/revoke", keys.revoke),
        *(
            route
            for path, entries in (("/admin/tenants", tenants), ("/admin/routes", routes))
            for route in (
                web.get(path, entries.list_all),
                web.get(path + "/{name:(?s:.+)}", entries.get),  # slashes, too; others get their 400
                web.put(path + "/{name:(?s:.+)}", entries.put),
                web.delete(path + "/{name:(?s:.+)}", entries.delete),
            )
        ),
    ]
