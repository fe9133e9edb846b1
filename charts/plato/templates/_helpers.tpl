{{/* The name of everything: the release's. */}}
{{- define "plato.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "plato.labels" -}}
app.kubernetes.io/name: plato
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "plato.selector" -}}
app.kubernetes.io/name: plato
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "plato.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (printf "%s-operator" (include "plato.name" .)) -}}
{{- end -}}

{{- define "plato.operatorImage" -}}
{{- .Values.image.reference | default (printf "%s/plato-operator:%s" .Values.image.registry (.Values.image.tag | default .Chart.AppVersion)) -}}
{{- end -}}

{{/* The watched namespaces, separated by commas. */}}
{{- define "plato.namespaces" -}}
{{- .Values.watchNamespaces | default (list .Release.Namespace) | uniq | join "," -}}
{{- end -}}

{{/* Refuses definitions of another release whose operator is there: with --take-ownership two releases would take them from each
     other by turns. Rendered away from a cluster nothing is known, and nothing refused. */}}
{{- define "plato.definitionsAreOurs" -}}
{{- $found := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "platoclusters.plato.im" }}
{{- $notes := dig "metadata" "annotations" dict $found }}
{{- $release := dig "meta.helm.sh/release-name" "" $notes }}
{{- $namespace := dig "meta.helm.sh/release-namespace" "" $notes }}
{{- if and $release $namespace (or (ne $release .Release.Name) (ne $namespace .Release.Namespace)) }}
{{- if lookup "apps/v1" "Deployment" $namespace (printf "%s-operator" ($release | trunc 40 | trimSuffix "-")) }}
{{- fail (printf "Plato's definitions (CRDs) belong to the release %s in the namespace %s, whose operator is there, and all releases share them: install this one with --set crds.install=false" $release $namespace) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What every container of ours may do: nothing. */}}
{{- define "plato.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "plato.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "plato.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
